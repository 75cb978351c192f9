"""The HTTP response that carries a stream: one send per event. It ends as soon as the client disconnects."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headrace_gateway import sse
from headrace_gateway.answer_reader import AnswerReader, ChunkAndCursor
from headrace_gateway.errors import ApiError

_CANCEL_AGAIN_SECONDS = 0.1
_REPLAYED_AT_ONCE = 512
"""Chunks of a long answer that are written before other tasks get a turn."""


class EventStream(Response):
    """Streams the chunks of one answer.

    Args:
        reader: of the answer; closed with `resources`.
        first: the chunks that were read before the status was known.
        framing: how the chunks are written.
        keep_alive: idle seconds after which a comment is sent.
    """

    def __init__(
        self,
        reader: AnswerReader,
        first: list[ChunkAndCursor] | None,
        resources: AsyncExitStack,
        *,
        framing: sse.Framing,
        keep_alive: float,
        headers: dict[str, str],
    ) -> None:
        super().__init__(headers={**sse.HEADERS, **headers})
        del self.headers["content-length"]
        self._reader = reader
        self._first = first
        self._resources = resources
        self._framing = framing
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
                yield self._framing.keep_alive
            for number, (chunk, cursor) in enumerate(chunks or (), 1):
                yield self._framing.event(chunk, cursor)
                if number % _REPLAYED_AT_ONCE == 0:
                    await asyncio.sleep(0)
            if self._reader.has_ended:
                yield self._framing.end
                return
            try:
                chunks = await self._reader.take(self._keep_alive)
            except ApiError as error:  # the stream has expired, so it cannot be rejoined
                yield self._framing.error(error)
                yield self._framing.end
                return


async def _wait_disconnect(receive: Receive) -> None:
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return


async def end_tasks(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks until they are done. Python 3.11 can lose a cancellation that coincides with a reply of Redis."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=_CANCEL_AGAIN_SECONDS)
    await asyncio.gather(*tasks, return_exceptions=True)


async def unless_disconnected(receive: Receive, work: Callable[[], Awaitable[Response]]) -> Response:
    """Run `work` while the client is connected; return an empty response if it disconnects."""
    working = asyncio.ensure_future(work())
    leaving = asyncio.create_task(_wait_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else Response(status_code=499)
    finally:
        await end_tasks(working, leaving)
