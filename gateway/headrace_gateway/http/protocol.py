"""`HttpProtocol`: uvicorn's HTTP/1.1 protocol, with limits for clients that are not authenticated yet.

- A head is at most 16 KiB and must arrive in `head_timeout` seconds, also on a connection that sends nothing at first.
- A body must arrive at 1 KiB/s or faster, and its chunks must not be tiny: each costs about 10 us to parse.
- Content-Length together with Transfer-Encoding is refused: a proxy may see another end of such a body.
- A response to a request whose body has not arrived closes the connection. The rest of the body is not parsed.

Input that is not valid HTTP gets an error in OpenAI's format.
"""

import asyncio
import contextlib
import math
from typing import Any, Final

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from headrace_gateway.errors import ApiError
from headrace_wire.codes import ConnectionCode

MAX_HEAD_BYTES: Final = 16 * 2**10
LEAST_BYTES_PER_SECOND: Final = 1024
"""Lowest rate of a body that the application is waiting for."""
FREE_CHUNKS: Final = 256
MIN_CHUNK_BYTES: Final = 64
"""The least average size of a body's chunks, if there are more than FREE_CHUNKS."""
_PIECE_BYTES: Final = 1024
"""Bytes of a head or of chunks that are parsed before the limits are checked again."""
_LINGER_SECONDS: Final = 2.0
"""Seconds that a refused connection stays open, so that its client can read the response before a reset."""
_ENCODE: Final = msgspec.json.Encoder().encode


class _Connection(h11.Connection):
    """An h11 server connection with further checks. `problem` is the RemoteProtocolError that it raised."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.problem: h11.RemoteProtocolError | None = None
        self.is_chunked = False
        self._num_chunks = self._num_bytes = 0

    def next_event(self) -> Any:
        try:
            event = super().next_event()
            self._check(event)
        except h11.RemoteProtocolError as error:
            self.problem = error
            raise
        return event

    def _check(self, event: object) -> None:
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
            names = {name for name, _ in event.headers}
            self.is_chunked = b"transfer-encoding" in names
            if self.is_chunked and b"content-length" in names:
                raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding exclude each other: send one")
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > FREE_CHUNKS and self._num_bytes < MIN_CHUNK_BYTES * self._num_chunks:
                raise h11.RemoteProtocolError(f"the chunks of a body must hold {MIN_CHUNK_BYTES} bytes on average")


class HttpProtocol(H11Protocol):
    """One connection.

    Args:
        head_timeout: seconds in which a request's head must arrive.
        body_timeout: seconds between two checks that a body arrives fast enough.
    """

    conn: _Connection

    def __init__(self, *args: Any, head_timeout: float, body_timeout: float, **named: Any) -> None:
        super().__init__(*args, **named)
        self.conn = _Connection()
        self._application: Final = self.app
        self.app = self._serve
        self._head_timeout: Final = head_timeout
        self._body_timeout: Final = body_timeout
        self._timer: asyncio.TimerHandle | None = None
        self._waiting_since = self.loop.time()
        self._counting_since, self._num_new_bytes = self._waiting_since, 0
        """`_num_new_bytes` counts the bytes of a body that have arrived since `_counting_since`."""
        self._is_refused = False
        """If True, bytes that still arrive are dropped."""
        self._closed: Final = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._waiting_since = self.loop.time()
        self._check_again()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._closed.set()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        self._closed.set()

    def data_received(self, data: bytes) -> None:
        if self.timeout_keep_alive_task is not None:  # the first bytes of the next request
            self._waiting_since = self.loop.time()
        self._unset_keepalive_if_required()
        if not self._is_body_missing:
            self._count_body()
        self._num_new_bytes += len(data)
        start = 0
        while start < len(data) and not self._is_refused:
            is_plain = self._is_body_missing and not self.conn.is_chunked
            end = len(data) if is_plain else start + _PIECE_BYTES
            self.conn.receive_data(data[start:end])
            self.handle_events()
            start = end

    def on_response_complete(self) -> None:
        self._waiting_since = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        problem = self.conn.problem
        status = 400 if problem is None else problem.error_status_hint
        self._refuse(status, ConnectionCode.INVALID_HTTP, f"the request is not valid HTTP/1.1: {problem or msg}")

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer with an error, without the application, and close the connection."""
        self._is_refused = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:  # the client would read a second response as part of the first
                self.transport.close()
                return
        body = _ENCODE(ApiError(status, "invalid_request_error", code, message).body())
        head = (
            f"HTTP/1.1 {status} {STATUS_PHRASES[status].decode()}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.flow.resume_reading()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)

    def _check_again(self, due: float = math.inf) -> None:
        """Schedule the next check: at `due`, or earlier if a state that begins now could time out before."""
        soon = self.loop.time() + min(self._head_timeout, self._body_timeout)
        self._timer = self.loop.call_at(min(due, soon), self._check)

    def _check(self) -> None:
        """Close the connection if its client is silent or too slow."""
        if self.transport.is_closing() or self._is_refused:
            return
        now, state, due = self.loop.time(), self.conn.their_state, math.inf
        if state is h11.IDLE and (self.cycle is None or self.cycle.response_complete):
            due = self._waiting_since + self._head_timeout
            if now >= due:
                self.transport.close()
                return
        elif state is h11.SEND_BODY and now < self._counting_since + self._body_timeout:
            due = self._counting_since + self._body_timeout
        elif state is h11.SEND_BODY:
            # while the application does not read, the client cannot send
            if not self.flow.read_paused and self._num_new_bytes < LEAST_BYTES_PER_SECOND * self._body_timeout:
                rate = f"{LEAST_BYTES_PER_SECOND} bytes a second"
                self._refuse(408, ConnectionCode.BODY_TIMEOUT, f"the body must arrive at {rate} or faster")
                return
            self._count_body()
        self._check_again(due)

    def _count_body(self) -> None:
        self._counting_since, self._num_new_bytes = self.loop.time(), 0

    @property
    def _is_body_missing(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the application. If it answers before the body has arrived, close the connection afterwards."""

        async def send_and_close(message: Any) -> None:
            if message["type"] == "http.response.start" and self._is_body_missing:
                headers = [each for each in message.get("headers", ()) if each[0] != b"connection"]
                message = {**message, "headers": [*headers, (b"connection", b"close")]}
            elif message["type"] == "http.response.body" and not message.get("more_body") and self._is_body_missing:
                await send({**message, "more_body": True})
                await self._linger()
                message = {"type": "http.response.body"}
            await send(message)

        await self._application(scope, receive, send_and_close)

    async def _linger(self) -> None:
        """Drop the rest of the body until the client has read the response."""
        self._is_refused = True
        self.flow.resume_reading()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                await self._closed.wait()
