"""`HealthServer`: `/metrics`, `/health/live` and `/health/ready` over HTTP.

One daemon thread runs an event loop of its own. What a client can cost is bounded: connections at a time, bytes of a
request, seconds from accept to close, and how often the exposition is rendered. A client that stalls holds one
connection until its deadline and nothing else; one that errs gets an error. Nothing here waits for the worker, and the
worker waits for nothing here.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace_monitoring.errors import HealthAddressError
from headrace_monitoring.exposition import ExpositionFormat

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
MAX_REQUEST_BYTES = 8192
DEADLINE_SECONDS = 5.0
# Rendering holds the interpreter; a flood of scrapes is answered from the last rendering.
RENDER_INTERVAL_SECONDS = 0.1
ACCEPT_PAUSE_SECONDS = 0.1

JSON_TYPE = "application/json"


@dataclass(frozen=True)
class Response:
    status: http.HTTPStatus
    body: bytes
    content_type: str = JSON_TYPE

    def encode(self, *, with_body: bool) -> bytes:
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n"
            f"Content-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\n"
            "Cache-Control: no-store\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode("ascii") + (self.body if with_body else b"")


class HealthServer:
    """Serves a worker's metrics and health.

    Args:
        exposition: renders the metrics in the form that is asked for (`Metrics.exposition`).
        not_ready: why the worker is not ready, None when it is (`WorkerHealth.not_ready`).
        not_alive: why the worker should be restarted, None when it should not (`WorkerHealth.not_alive`).
        host: address to listen on.
        port: port to listen on; 0 takes a free one, see `url`.
        deadline_seconds: the longest that one connection may last.

    The three callables run on the server's thread, so they must neither block nor wait for the worker.
    """

    def __init__(
        self,
        *,
        exposition: Callable[[ExpositionFormat], bytes],
        not_ready: Callable[[], str | None],
        not_alive: Callable[[], str | None],
        host: str = "127.0.0.1",
        port: int = 0,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self._exposition = exposition
        self._not_ready = not_ready
        self._not_alive = not_alive
        self._host = host
        self._port = port
        self._deadline = deadline_seconds
        self._rendered: dict[ExpositionFormat, tuple[float, bytes]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None

    @property
    def url(self) -> str:
        """Where the server listens, known once it was started."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    def start(self) -> None:
        """Listen and serve. Raises HealthAddressError when the address cannot be had."""
        assert self._thread is None, "started twice"
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listener = socket.create_server((self._host, self._port), family=family, backlog=MAX_CONNECTIONS)
        except (OSError, OverflowError) as error:
            raise HealthAddressError(self._host, self._port, str(error)) from error
        listener.setblocking(False)
        self._port = listener.getsockname()[1]
        started = threading.Event()

        def run() -> None:
            try:
                asyncio.run(self._serve(listener, started))
            finally:
                listener.close()
                started.set()

        self._thread = threading.Thread(target=run, name="headrace-health", daemon=True)
        self._thread.start()
        started.wait()
        if self._loop is None:
            raise HealthAddressError(self._host, self._port, "the event loop did not start")

    def stop(self) -> None:
        """Close the port and every connection. Does nothing when not started.

        Waits for the thread, though not for ever: one of the callables may hang.
        """
        if self._thread is None or self._loop is None or self._stop is None:
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(self._deadline)
        self._thread = self._loop = self._stop = None

    def __enter__(self) -> HealthServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def _serve(self, listener: socket.socket, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        answers: set[asyncio.Task[None]] = set()
        self._loop.add_reader(listener, self._accept, self._loop, listener, answers)
        started.set()
        try:
            await self._stop.wait()
        finally:
            self._loop.remove_reader(listener)

    def _accept(
        self, loop: asyncio.AbstractEventLoop, listener: socket.socket, answers: set[asyncio.Task[None]]
    ) -> None:
        """Take one connection. The loop calls it while clients wait at the listener."""
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the client went away
            return
        except OSError as error:  # no file descriptor is left: asked again at once, the loop would spin
            log.warning("cannot accept a connection: %s", error.strerror)
            loop.remove_reader(listener)
            loop.call_later(ACCEPT_PAUSE_SECONDS, loop.add_reader, listener, self._accept, loop, listener, answers)
            return
        if len(answers) >= MAX_CONNECTIONS:
            connection.close()
            return

        def end(task: asyncio.Task[None]) -> None:
            answers.discard(task)
            connection.close()  # here and not in _answer, which a stop may cancel before its first line

        answer = loop.create_task(self._answer(connection))
        answers.add(answer)
        answer.add_done_callback(end)

    async def _answer(self, connection: socket.socket) -> None:
        """One request, one response, within the deadline."""
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        with contextlib.suppress(OSError, TimeoutError):  # who asks too slowly, or goes away, gets no answer
            async with asyncio.timeout(self._deadline):
                request = await self._read_head(connection)
                if request is None:
                    return
                method, response = self._respond(request)
                await loop.sock_sendall(connection, response.encode(with_body=method != "HEAD"))
                # Closing with bytes unread would reset the connection, and the response might be lost with it.
                connection.shutdown(socket.SHUT_WR)
                while await loop.sock_recv(connection, MAX_REQUEST_BYTES):
                    pass

    async def _read_head(self, connection: socket.socket) -> bytes | None:
        """The request up to the blank line, or as much as is accepted; None when the client hung up before."""
        loop = asyncio.get_running_loop()
        request = b""
        while b"\r\n\r\n" not in request and len(request) < MAX_REQUEST_BYTES:
            received = await loop.sock_recv(connection, MAX_REQUEST_BYTES - len(request))
            if not received:
                return None
            request += received
        return request

    def _respond(self, request: bytes) -> tuple[str, Response]:
        """The method and the response to a request's head."""
        if b"\r\n\r\n" not in request:
            return "GET", _failure(http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        line, *fields = request.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
        words = line.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/"):
            return "GET", _failure(http.HTTPStatus.BAD_REQUEST)
        method, target = words[0], words[1].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return method, _failure(http.HTTPStatus.METHOD_NOT_ALLOWED)
        try:
            return method, self._route(target, fields)
        except Exception:  # the server outlives what it asks
            log.exception("answering %s failed", target[:64])
            return method, _failure(http.HTTPStatus.INTERNAL_SERVER_ERROR)

    def _route(self, target: str, fields: Sequence[str]) -> Response:
        match target:
            case "/metrics":
                form = ExpositionFormat.asked_for(_accept(fields))
                return Response(http.HTTPStatus.OK, self._render(form), form.value)
            case "/health/live":
                return _probe(self._not_alive())
            case "/health/ready":
                return _probe(self._not_ready())
            case _:
                return _failure(http.HTTPStatus.NOT_FOUND)

    def _render(self, form: ExpositionFormat) -> bytes:
        now = time.monotonic()
        rendered = self._rendered.get(form)
        if rendered is None or now - rendered[0] >= RENDER_INTERVAL_SECONDS:
            rendered = self._rendered[form] = now, self._exposition(form)
        return rendered[1]


def _accept(fields: Sequence[str]) -> str:
    """The header `Accept` of a request; one that comes twice means both."""
    pairs = (field.partition(":") for field in fields)
    return ",".join(value for name, _, value in pairs if name.strip().lower() == "accept")


def _probe(problem: str | None) -> Response:
    if problem is None:
        return Response(http.HTTPStatus.OK, json.dumps({"status": "ok"}).encode())
    body = {"status": "unavailable", "reason": problem}
    return Response(http.HTTPStatus.SERVICE_UNAVAILABLE, json.dumps(body).encode())


def _failure(status: http.HTTPStatus) -> Response:
    return Response(status, json.dumps({"status": "error", "reason": status.phrase}).encode())
