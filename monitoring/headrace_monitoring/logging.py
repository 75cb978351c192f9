"""One format for every log line: ours, Celery's and the libraries', as JSON or for a terminal.

structlog sits on the standard library's root logger, so every library's lines come out here. What a request says never
does: prompts, generated text and token ids are removed by name, whatever way they came in, and objects are shown by
their type only, since a repr may hold a prompt.

Context is `process_fields.set(worker=...)` once at the start, and structlog's
`structlog.contextvars.bound_contextvars(request_id=...)` around the work for a request.
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

# Keys under which the message, the engine and Celery carry what a request says.
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

# Where a sentence of Celery's or kombu's starts to quote a message, its arguments or its result; what follows is cut.
CELERY_QUOTES = (
    "The full contents of the message body was:",
    "Can't decode message body:",
    " on channel %r: %s",
    "before the worker was lost:",
    "(args:",
    "Task: %r",
)


class StaticFields:
    """A processor that adds the same fields to every event of this process, whatever thread it comes from."""

    def __init__(self) -> None:
        self._fields: dict[str, str] = {}

    def __call__(self, _: WrappedLogger, __: str, event_dict: EventDict) -> EventDict:
        for key, value in self._fields.items():
            event_dict.setdefault(key, value)
        return event_dict

    def set(self, **fields: str) -> None:
        """From now on; replaces what was set before."""
        self._fields = fields


process_fields = StaticFields()


def set_level(level: str) -> str:
    """Change the level of every logger while the process runs; returns the one before.

    Raises LogLevelError for a name that is none.
    """
    if not isinstance(level, str) or level.upper() not in LEVELS:
        raise LogLevelError(level, LEVELS)
    root = logging.getLogger()
    before = logging.getLevelName(root.level)
    root.setLevel(level.upper())
    return str(before)


def takes_colours(stream: TextIO) -> bool:
    """Whether colour codes may be written: to a terminal that knows them, and whose user does not refuse them."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def configure_logging(
    level: str = "INFO",
    json: bool | None = None,
    *,
    stream: TextIO | None = None,
    file: str | None = None,
    colours: bool = True,
) -> None:
    """Send every log line to `stream` (stderr) in one format. Calling it again replaces the first call.

    Args:
        level: DEBUG, INFO, WARNING, ERROR or CRITICAL, in any case. Raises LogLevelError for another.
        json: one JSON object a line; None means JSON unless `stream` is a terminal.
        file: append to this file instead, and open it anew where it was renamed, as logrotate does.
        colours: False leaves them out even where the terminal takes them.
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
        # a cached logger would keep the processors of an earlier call
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream) if file is None else WatchedFileHandler(file, encoding="utf-8")
    handler.addFilter(remove_private_arguments)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                # plain tracebacks: the richer ones print local variables, and those hold prompts
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


def _renderer(as_json: bool, *, colours: bool) -> Processor:
    if as_json:
        return structlog.processors.JSONRenderer()
    return structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback)


def remove_private_keys(_: WrappedLogger, __: str, event_dict: EventDict) -> EventDict:
    """Drop what a request says from an event, at any depth, and name the keys that were dropped."""
    dropped: set[str] = set()
    event: EventDict = {key: _plain(value, dropped, 0) for key, value in _public(event_dict, dropped).items()}
    if dropped:
        event["dropped_keys"] = sorted(dropped)
    return event


def _public(values: Mapping[str, object], dropped: set[str]) -> dict[str, object]:
    dropped.update(key for key in values if key in PRIVATE_KEYS)
    return {str(key): value for key, value in values.items() if key not in PRIVATE_KEYS}


def _plain(value: object, dropped: set[str], depth: int) -> object:
    """The value if it is plain, its type otherwise."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if depth < MAX_DEPTH:
        if isinstance(value, Mapping):
            return {key: _plain(inner, dropped, depth + 1) for key, inner in _public(value, dropped).items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [_plain(inner, dropped, depth + 1) for inner in value]
    return f"<{type(value).__name__}>"


def remove_private_arguments(record: logging.LogRecord) -> bool:
    """A filter that drops nothing and takes what a request says out of a record before it becomes a sentence.

    Celery logs a finished task with its return value as a named argument, and dumps messages it cannot read.
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
    """What was raised and where, without the error's own text, which may quote a request."""
    return "".join([*traceback.format_tb(error.__traceback__), type(error).__name__])
