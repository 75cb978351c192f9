"""When the gateway closes a connection whose client is silent or slow: at the time-out, not at the next check."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from headrace_gateway.http.protocol import HttpProtocol

HEAD_TIMEOUT: Final = 10.0
POST: Final = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n"


class Timers(asyncio.AbstractEventLoop):
    """The time and the timers of an event loop. Only the test moves the time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._timers: list[asyncio.TimerHandle] = []

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, **_: Any) -> asyncio.TimerHandle:
        self._timers.append(asyncio.TimerHandle(when, callback, args, self))
        return self._timers[-1]

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, **_: Any) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def create_task(self, coro: Any, **_: Any) -> Any:
        coro.close()
        return asyncio.Future(loop=self)

    def run_until(self, end: float) -> None:
        while due := [timer for timer in self._timers if timer.when() <= end and not timer.cancelled()]:
            first = min(due, key=asyncio.TimerHandle.when)
            self._timers.remove(first)
            self.now = max(self.now, first.when())
            first._run()
        self.now = end


class Transport(asyncio.Transport):
    """Notes when it was closed, and what was written to it."""

    def __init__(self, timers: Timers) -> None:
        super().__init__()
        self._timers = timers
        self.closed_at: float | None = None
        self.written = b""

    def close(self) -> None:
        self.closed_at = self.closed_at or self._timers.now

    def is_closing(self) -> bool:
        return self.closed_at is not None

    def write(self, data: Any) -> None:
        self.written += data


class Connection:
    def __init__(self, body_timeout: float) -> None:
        self.timers = Timers()
        self.start = self.timers.now
        self.transport = Transport(self.timers)
        config = Config(app=lambda *_: None, http=HttpProtocol, log_config=None)
        config.load()
        times = {"head_timeout": HEAD_TIMEOUT, "body_timeout": body_timeout}
        self.protocol = HttpProtocol(config, ServerState(), {}, _loop=self.timers, **times)
        self.protocol.connection_made(self.transport)

    def run(self, seconds: float) -> None:
        self.timers.run_until(self.start + seconds)


@pytest.mark.parametrize("body_timeout", [3.0, 7.0, 30.0])
@pytest.mark.parametrize("sent", [b"", b"GET / HT"])
def test_a_silent_connection_is_closed_at_the_time_out(body_timeout: float, sent: bytes) -> None:
    connection = Connection(body_timeout)
    connection.protocol.data_received(sent)
    connection.run(40)
    assert connection.transport.closed_at == connection.start + HEAD_TIMEOUT


def test_the_head_of_a_second_request_has_its_own_time() -> None:
    connection = Connection(body_timeout=30.0)
    connection.run(4)
    connection.protocol.timeout_keep_alive_task = connection.timers.call_later(100, print)  # a response was sent
    connection.protocol.data_received(b"GET / HT")
    connection.run(40)
    assert connection.transport.closed_at == connection.start + 4 + HEAD_TIMEOUT


def test_a_body_that_stops_is_refused_at_the_time_out() -> None:
    connection = Connection(body_timeout=5.0)
    connection.run(4)
    connection.protocol.data_received(POST)
    connection.run(8.9)
    assert connection.transport.written == b""
    connection.run(9)
    assert connection.transport.written.startswith(b"HTTP/1.1 408 ")
