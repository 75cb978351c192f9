"""One format for all log lines of a process: Headrace's, Celery's and other libraries'. JSON, or text for a terminal.

structlog formats the lines of the standard library's root logger. No line contains a prompt, generated text or token
ids: the keys that hold them are removed. Objects are shown by their type, since a repr may contain a prompt.

`process_fields.set(worker=...)` sets the fields of a process. structlog's
`structlog.contextvars.bound_contextvars(request_id=...)` sets the fields of a request.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Mapping
from logging.handlers import WatchedFileHandler
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from headrace_monitoring.errors import LogLevelError

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

# Keys that hold the content of a request in messages, in the engine and in Celery.
PRIVATE_KEYS = frozenset(
    {
        "args",
        "argsrepr",
        "body",
        "content",
        "kwargs",
        "kwargsrepr",
        "messages",
        "output_token_ids",
        "outputs",
        "prompt",
        "prompt_token_ids",
        "prompts",
        "result",
        "return_value",
        "text",
        "token_ids",
    }
)
REMOVED = "[removed]"
MAX_DEPTH = 6

# After these texts, a log line of Celery or kombu quotes a message, its arguments or its result. The rest is removed.
CELERY_QUOTES = (
    "The full contents of the message body was:",
    "Can't decode message body:",
    " on channel %r: %s",
    "before the worker was lost:",
    "(args:",
    "Task: %r",
)


class StaticFields:
    """A structlog processor that adds the same fields to every event of the process, from any thread."""

    def __init__(self) -> None:
        self._fields: dict[str, str] = {}

    def __call__(self, _: WrappedLogger, __: str, event_dict: EventDict) -> EventDict:
        for key, value in self._fields.items():
            event_dict.setdefault(key, value)
        return event_dict

    def set(self, **fields: str) -> None:
        """Replace the fields."""
        self._fields = fields


process_fields = StaticFields()


def set_level(level: str) -> str:
    """Set the level of the root logger and return the previous one. Raises LogLevelError for an unknown name."""
    if not isinstance(level, str) or level.upper() not in LEVELS:
        raise LogLevelError(level, LEVELS)
    root = logging.getLogger()
    before = logging.getLevelName(root.level)
    root.setLevel(level.upper())
    return str(before)


def takes_colours(stream: TextIO) -> bool:
    """Return whether to write colour codes: `stream` is a terminal, TERM is not dumb, and NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def configure_logging(
    level: str = "INFO",
    json: bool | None = None,
    *,
    stream: TextIO | None = None,
    file: str | None = None,
    colours: bool = True,
) -> bool:
    """Write all log lines and warnings to `stream` (default: stderr) in one format. A later call replaces the handler.

    Args:
        level: DEBUG, INFO, WARNING, ERROR or CRITICAL, in any case. Raises LogLevelError for another name.
        json: write one JSON object per line. None: JSON unless `stream` is a terminal.
        file: append to this file instead. It is reopened after a rename, so logrotate can rotate it.
        colours: False: write no colour codes.

    Returns:
        Whether the lines are JSON.
    """
    if level.upper() not in LEVELS:
        raise LogLevelError(level, LEVELS)
    stream = sys.stderr if stream is None else stream
    as_json = (file is not None or not stream.isatty()) if json is None else json
    colours = colours and file is None and takes_colours(stream)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        process_fields,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        # a cached logger would use the processors of an earlier call
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream) if file is None else WatchedFileHandler(file, encoding="utf-8")
    handler.addFilter(remove_private_arguments)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                # plain tracebacks: rich ones print local variables, which may contain prompts
                structlog.processors.StackInfoRenderer(),
                structlog.processors.format_exc_info,
                remove_private_keys,
                _renderer(as_json, colours=colours),
            ],
        )
    )
    root = logging.getLogger()
    for replaced in root.handlers:
        if isinstance(replaced, WatchedFileHandler):
            replaced.close()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)  # otherwise Python writes warnings to stderr
    return as_json


def _renderer(as_json: bool, *, colours: bool) -> Processor:
    if as_json:
        return structlog.processors.JSONRenderer()
    return structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback)


def remove_private_keys(_: WrappedLogger, __: str, event_dict: EventDict) -> EventDict:
    """Remove the content of requests from an event, at any depth, and list the removed keys."""
    dropped: set[str] = set()
    event: EventDict = {key: _plain(value, dropped, 0) for key, value in _public(event_dict, dropped).items()}
    if dropped:
        event["dropped_keys"] = sorted(dropped)
    return event


def _public(values: Mapping[str, object], dropped: set[str]) -> dict[str, object]:
    dropped.update(key for key in values if key in PRIVATE_KEYS)
    return {str(key): value for key, value in values.items() if key not in PRIVATE_KEYS}


def _plain(value: object, dropped: set[str], depth: int) -> object:
    """Return a plain value as it is, and the type of any other."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if depth < MAX_DEPTH:
        if isinstance(value, Mapping):
            return {key: _plain(inner, dropped, depth + 1) for key, inner in _public(value, dropped).items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [_plain(inner, dropped, depth + 1) for inner in value]
    return f"<{type(value).__name__}>"


def remove_private_arguments(record: logging.LogRecord) -> bool:
    """Remove the content of requests from a record before it is formatted. A logging filter that keeps every record.

    Celery logs the return value of a task as a named argument, and logs messages that it cannot decode in full.
    """
    if isinstance(record.args, Mapping):
        record.args = {key: REMOVED if key in PRIVATE_KEYS else value for key, value in record.args.items()}
    if record.name.startswith(("celery", "kombu")):
        template = str(record.msg)
        starts = [start for quote in CELERY_QUOTES if (start := template.find(quote)) >= 0]
        if starts and isinstance(record.args, tuple):
            before = template[: min(starts)]
            record.msg = before % record.args[: before.count("%")] + REMOVED
            record.args = record.exc_info = None
    return True


def frames(error: BaseException) -> str:
    """Return the traceback and the type of an error, without its message, which may quote a request."""
    return "".join([*traceback.format_tb(error.__traceback__), type(error).__name__])
