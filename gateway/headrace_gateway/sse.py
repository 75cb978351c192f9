"""Server-sent events in the formats that each API's clients read: one event per send, LF line endings."""

from typing import Any, Final, Protocol

from headrace_gateway.cursor import Cursor
from headrace_gateway.errors import ApiError
from headrace_gateway.headers import ResumeStyle
from headrace_gateway.line_json import encode_line

HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}
DONE: Final = b"data: [DONE]\n\n"
_COMMENT: Final = b": keep-alive\n\n"


class Framing(Protocol):
    """How the chunks of one stream are written."""

    end: bytes
    """What follows the last chunk."""

    @property
    def keep_alive(self) -> bytes:
        """What an idle stream sends, so that proxies keep its connection open."""

    def event(self, chunk: dict[str, Any], cursor: Cursor) -> bytes:
        """Return one chunk as an event."""

    def error(self, failure: ApiError) -> bytes:
        """Return the event that ends a stream with an error, after its status was sent."""


class DataFraming:
    """`data:` lines only, for chat and text completions.

    A stream has `id:` lines or comments, never both: after an id, openai-python parses a comment as an empty event.
    """

    end: bytes = DONE

    def __init__(self, style: ResumeStyle) -> None:
        self._style: Final = style

    @property
    def keep_alive(self) -> bytes:
        return b"event: ping\ndata: {}\n\n" if self._style == "id" else _COMMENT

    def event(self, chunk: dict[str, Any], cursor: Cursor) -> bytes:
        if self._style == "id":
            return b"id: %b\ndata: %b\n\n" % (str(cursor).encode(), encode_line(chunk))
        if self._style == "chunk":
            chunk = {**chunk, "headrace": {"cursor": str(cursor)}}
        return b"data: %b\n\n" % encode_line(chunk)

    def error(self, failure: ApiError) -> bytes:
        return b"data: %b\n\n" % encode_line(failure.body())


class ResponseFraming:
    """Events of the Responses API.

    Args:
        after: sequence number of the last event that the client has.
    """

    end: bytes = DONE
    keep_alive: bytes = _COMMENT

    def __init__(self, after: int = -1) -> None:
        self._last = after

    def event(self, chunk: dict[str, Any], _cursor: Cursor) -> bytes:
        self._last = chunk["sequence_number"]
        return named_event(chunk)

    def error(self, failure: ApiError) -> bytes:
        told = {"code": failure.code, "message": failure.message, "param": failure.param}
        return named_event({"type": "error", "sequence_number": self._last + 1, **told})


def named_event(chunk: dict[str, Any]) -> bytes:
    """Return an event named by the chunk's `type`, as in the Responses and Messages APIs."""
    return b"event: %b\ndata: %b\n\n" % (chunk["type"].encode(), encode_line(chunk))
