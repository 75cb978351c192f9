"""Server-sent events as OpenAI's clients read them: `data:` lines, one event a send, LF alone.

`id:` lines and comments exclude each other: after an id, openai-python takes a comment for an empty event.
"""

from typing import Any, Final

import msgspec

from headrace_gateway.cursor import Cursor
from headrace_gateway.errors import ApiError
from headrace_gateway.headers import ResumeStyle

HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}
DONE: Final = b"data: [DONE]\n\n"
_ENCODE: Final = msgspec.json.Encoder().encode


def event(chunk: dict[str, Any], cursor: Cursor, style: ResumeStyle) -> bytes:
    """One chunk as an event."""
    if style == "id":
        return b"id: %b\ndata: %b\n\n" % (str(cursor).encode(), _ENCODE(chunk))
    if style == "chunk":
        chunk = {**chunk, "headrace": {"cursor": str(cursor)}}
    return b"data: %b\n\n" % _ENCODE(chunk)


def keep_alive(style: ResumeStyle) -> bytes:
    """What a silent stream carries, so that proxies keep its connection."""
    return b"event: ping\ndata: {}\n\n" if style == "id" else b": keep-alive\n\n"


def error(failure: ApiError) -> bytes:
    """What ends a stream whose status was sent long ago."""
    return b"data: %b\n\n" % _ENCODE(failure.body())
