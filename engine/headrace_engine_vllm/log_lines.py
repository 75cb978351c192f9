"""Removes the content of requests from vLLM's log lines, which may quote tokens, schemas and text."""

import logging
from typing import Final

OWN: Final = "headrace"
DUMPS: Final = "vllm.logging_utils.dump_input"
"""This logger writes whole requests when a step fails."""
_ABOUT_SCHEDULERS: Final = "vllm.config.scheduler"


class WithoutRequests(logging.Filter):
    """Removes the values from messages of other packages once requests are served.

    A message with arguments keeps its template. A message without arguments may contain values already: only its logger
    and line number are kept. Of an exception, only the type is kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_serving = False

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == _ABOUT_SCHEDULERS and str(record.msg).startswith("Using custom scheduler class"):
            return False  # the custom class is ours, see `scheduler.resuming`
        if not self.is_serving or record.name.partition("_")[0] == OWN:
            return True
        if record.levelno < logging.WARNING:
            return False
        template = record.msg if record.args and isinstance(record.msg, str) else "a message"
        kind = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else None
        at = f"{record.name} line {record.lineno}"
        record.msg = f"{template} (values left out, {at}{f', {kind}' if kind else ''})"
        record.args, record.exc_info, record.exc_text, record.stack_info = (), None, None, None
        return True


def guard_logs() -> WithoutRequests:
    """Filter all log lines of this process. Return the filter: its `is_serving` is set when requests are served."""
    logging.getLogger(DUMPS).disabled = True
    kept = WithoutRequests()
    for handler in logging.getLogger().handlers:
        handler.addFilter(kept)
    return kept
