"""Answers as server-sent events, in the format that each API's clients read, and the HTTP response that sends them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, Final, Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headrace_gateway.answers.reader import AnswerReader, ChunkAndCursor, Cursor
from headrace_gateway.background_task import end_tasks
from headrace_gateway.errors import ApiError
from headrace_gateway.http.json import encode_line
from headrace_gateway.requests.headers import ResumeStyle

HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}
DONE: Final = b"data: [DONE]\n\n"
_REPLAYED_AT_ONCE: Final = 512
"""Chunks of a long answer that are written before other tasks get a turn."""
_COMMENT: Final = b": keep-alive\n\n"


class EventEncoder(Protocol):
    """Encodes the chunks of one stream as events."""

    end: bytes
    """Bytes sent after the last chunk."""

    @property
    def keep_alive(self) -> bytes:
        """Bytes that an idle stream sends so that proxies keep its connection open."""

    def event(self, chunk: dict[str, Any], cursor: Cursor) -> bytes:
        """Return one chunk as an event."""

    def error(self, failure: ApiError) -> bytes:
        """Return the event that reports an error after the HTTP status was sent."""


class DataEncoder:
    """Encodes chunks of chat and text completions, as `data:` lines only.

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


class ResponseEncoder:
    """Encodes events of the Responses API.

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


class EventStream(Response):
    """Streams the chunks of one answer, one send per event. It ends as soon as the client disconnects.

    Args:
        reader: reads the answer. `resources` closes it.
        first: the chunks that were read before the HTTP status was chosen; None if no chunk has arrived.
        encoder: encodes the chunks as events of the API.
        keep_alive: idle seconds after which `encoder.keep_alive` is sent.
    """

    def __init__(
        self,
        reader: AnswerReader,
        first: list[ChunkAndCursor] | None,
        resources: AsyncExitStack,
        *,
        encoder: EventEncoder,
        keep_alive: float,
        headers: dict[str, str],
    ) -> None:
        super().__init__(headers={**HEADERS, **headers})
        del self.headers["content-length"]
        self._reader = reader
        self._first = first
        self._resources = resources
        self._encoder = encoder
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # ASGI's signature
        writing = asyncio.create_task(self._write(send))
        leaving = asyncio.create_task(_wait_disconnect(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                await writing
        finally:
            await end_tasks(writing, leaving)
            await self._resources.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events():
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        chunks = self._first
        while True:
            if chunks is None:
                yield self._encoder.keep_alive
            for number, (chunk, cursor) in enumerate(chunks or (), 1):
                yield self._encoder.event(chunk, cursor)
                if number % _REPLAYED_AT_ONCE == 0:
                    await asyncio.sleep(0)
            if self._reader.has_ended:
                yield self._encoder.end
                return
            try:
                chunks = await self._reader.take(self._keep_alive)
            except ApiError as error:  # the stream has expired, so it cannot be rejoined
                yield self._encoder.error(error)
                yield self._encoder.end
                return


async def _wait_disconnect(receive: Receive) -> None:
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return


async def unless_disconnected(receive: Receive, work: Callable[[], Awaitable[Response]]) -> Response:
    """Run `work` while the client is connected; return an empty response if it disconnects."""
    working = asyncio.ensure_future(work())
    leaving = asyncio.create_task(_wait_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else Response(status_code=499)
    finally:
        await end_tasks(working, leaving)
