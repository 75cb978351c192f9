"""Log lines of vLLM without what a request brought: its messages may quote tokens, schemas, words."""

import logging
from typing import Final

OWN: Final = "headrace"
DUMPS: Final = "vllm.logging_utils.dump_input"
"""Logs requests whole when a step fails."""
_ABOUT_SCHEDULERS: Final = "vllm.config.scheduler"


class WithoutRequests(logging.Filter):
    """Keeps the values out of the messages of others once requests are served.

    A message is kept as it stands in the code, with its places unfilled; one that was filled before it was logged is
    told by the line of code that logged it. An exception is told by its type.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_serving = False

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == _ABOUT_SCHEDULERS and str(record.msg).startswith("Using custom scheduler class"):
            return False  # `scheduler.resuming` does what it warns of
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
    """Put the filter before all lines of this process. Returns it, to be told when requests are served."""
    logging.getLogger(DUMPS).disabled = True
    kept = WithoutRequests()
    for handler in logging.getLogger().handlers:
        handler.addFilter(kept)
    return kept
