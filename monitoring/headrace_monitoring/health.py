"""The health of a worker, and the server of `/metrics`, `/health/live` and `/health/ready`.

The server is the standard library's threaded server. It limits the number of connections, their duration, and how often
metrics are rendered. The server and the worker never wait for each other.
"""

from __future__ import annotations

import contextlib
import http
import json
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from headrace_monitoring.errors import HealthAddressError
from headrace_monitoring.exposition import ExpositionFormat
from headrace_monitoring.labels import WorkerState


class WorkerHealth:
    """Holds the state that the probes report.

    Only the worker's loop writes an attribute, and the server's threads read it. Each write replaces a whole value, so
    no lock is needed.

    Args:
        heartbeat_timeout: seconds without `heartbeat` after which the loop counts as stuck.
        step_timeout: seconds with requests in flight and no `stepped` after which the engine counts as stuck.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        *,
        heartbeat_timeout: float = 60.0,
        step_timeout: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._heartbeat_timeout = heartbeat_timeout
        self._step_timeout = step_timeout
        self._clock = clock
        self._state: WorkerState = "loading"
        self._loaded = 0.0
        self._heartbeat_at: float | None = None
        # time of the last step, or of the first heartbeat with requests in flight; None while none is in flight
        self._progress_at: float | None = None
        self._queue_problem: str | None = None
        self._preparation_problem: str | None = None
        self._stream_problem: str | None = None

    def queue_blocked(self, problem: str | None) -> None:
        """Set the reason why Redis gives the worker no messages; None if it gives them."""
        self._queue_problem = problem

    def preparation_blocked(self, problem: str | None) -> None:
        """Set the reason why requests cannot be prepared, and the worker takes none; None if it takes them."""
        self._preparation_problem = problem

    def streams_blocked(self, problem: str | None) -> None:
        """Set the reason why the worker cannot write some streams, and takes no messages; None if it can."""
        self._stream_problem = problem

    def state(self, state: WorkerState) -> None:
        """Set the worker's state. A loading engine cannot step, so the time without a step counts from here."""
        self._state = state
        if self._progress_at is not None:
            self._progress_at = self._clock()

    def loading(self, share: float) -> None:
        """Set the share of the model's weights that is loaded, 0 to 1."""
        self._loaded = share

    def heartbeat(self, in_flight: int) -> None:
        """Record one turn of the worker's loop, with the number of requests in the engine."""
        now = self._clock()
        self._heartbeat_at = now
        if in_flight == 0:
            self._progress_at = None
        elif self._progress_at is None:
            self._progress_at = now

    def stepped(self) -> None:
        """Record a step of the engine."""
        if self._progress_at is not None:
            self._progress_at = self._clock()

    def not_ready(self) -> str | None:
        """Return why the worker takes no requests; None: it takes them."""
        if self._state == "loading" and self._loaded:
            return f"the worker is loading: {100 * self._loaded:.0f} % of the weights"
        if self._state != "ready":
            return f"the worker is {self._state}"
        if self._queue_problem is not None:
            return f"the queue cannot be served: {self._queue_problem}"
        if self._stream_problem is not None:
            return f"streams cannot be written: {self._stream_problem}"
        if self._preparation_problem is not None:
            return f"requests cannot be prepared: {self._preparation_problem}"
        return self.not_alive()

    def not_alive(self) -> str | None:
        """Return why the worker should be restarted; None: it should not.

        Before the first heartbeat the worker is alive. A startup probe limits the time of a start.
        """
        now = self._clock()
        heartbeat_at, progress_at = self._heartbeat_at, self._progress_at
        if heartbeat_at is not None and now - heartbeat_at > self._heartbeat_timeout:
            return f"no heartbeat for {now - heartbeat_at:.0f} s (limit {self._heartbeat_timeout:g} s)"
        if self._state != "loading" and progress_at is not None and now - progress_at > self._step_timeout:
            return f"requests in flight and no step for {now - progress_at:.0f} s (limit {self._step_timeout:g} s)"
        return None


log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
DEADLINE_SECONDS = 5.0
# Rendering holds the interpreter lock, so many scrapes at once get one rendering.
RENDER_INTERVAL_SECONDS = 0.1
ACCEPT_PAUSE_SECONDS = 0.1

JSON_TYPE = "application/json"


class HealthServer:
    """Serves a process's metrics and health.

    Args:
        exposition: renders the metrics in the requested format (`Metrics.exposition`).
        not_ready: returns why the worker is not ready; None if it is (`WorkerHealth.not_ready`).
        not_alive: returns why the worker should be restarted; None if it should not (`WorkerHealth.not_alive`).
        host: address to listen on.
        port: port to listen on; 0 takes a free one, see `url`.
        deadline_seconds: the maximum duration of one connection.

    The three callables run on the server's threads. They must not block, and must not wait for the worker.
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
        self._probes = {"/health/live": not_alive, "/health/ready": not_ready}
        self._host = host
        self._port = port
        self._deadline = deadline_seconds
        self._rendering = threading.Lock()
        self._rendered: dict[ExpositionFormat, tuple[float, bytes]] = {}
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The server's URL. Known after `start`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    def start(self) -> None:
        """Listen and serve. Raises HealthAddressError if the server cannot listen on the address."""
        assert self._server is None, "started twice"
        try:
            self._server = _Server(self._host, self._port, self._respond, self._deadline)
        except (OSError, OverflowError) as error:
            raise HealthAddressError(self._host, self._port, str(error)) from error
        self._port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="headrace-health", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the port and every connection. Does nothing when not started."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join()
        self._server.cut_off(older_than=0.0)
        self._server.server_close()
        self._server = self._thread = None

    def __enter__(self) -> HealthServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _respond(self, path: str, accept: str) -> tuple[http.HTTPStatus, str, bytes]:
        """Return the status, the content type and the body for a path."""
        if path == "/metrics":
            asked = ExpositionFormat.asked_for(accept)
            return http.HTTPStatus.OK, asked.value, self._render(asked)
        if path not in self._probes:
            return _failure(http.HTTPStatus.NOT_FOUND)
        problem = self._probes[path]()
        if problem is None:
            return http.HTTPStatus.OK, JSON_TYPE, json.dumps({"status": "ok"}).encode()
        body = {"status": "unavailable", "reason": problem}
        return http.HTTPStatus.SERVICE_UNAVAILABLE, JSON_TYPE, json.dumps(body).encode()

    def _render(self, asked: ExpositionFormat) -> bytes:
        with self._rendering:
            now = time.monotonic()
            rendered = self._rendered.get(asked)
            if rendered is None or now - rendered[0] >= RENDER_INTERVAL_SECONDS:
                rendered = self._rendered[asked] = now, self._exposition(asked)
            return rendered[1]


def _failure(status: http.HTTPStatus) -> tuple[http.HTTPStatus, str, bytes]:
    return status, JSON_TYPE, json.dumps({"status": "error", "reason": status.phrase}).encode()


class _Server(socketserver.ThreadingTCPServer):
    """A thread for each connection, up to MAX_CONNECTIONS. Further connections are closed at once."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(
        self, host: str, port: int, respond: Callable[[str, str], tuple[http.HTTPStatus, str, bytes]], deadline: float
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.respond = respond
        self._deadline = deadline
        self._accepted_at: dict[socket.socket, float] = {}
        super().__init__((host, port), _Handler)

    def cut_off(self, older_than: float) -> None:
        """Close the connections that are open for at least `older_than` seconds. Their threads end with them."""
        now = time.monotonic()
        for connection, accepted_at in list(self._accepted_at.items()):
            if now - accepted_at >= older_than:
                with contextlib.suppress(OSError):  # the client has closed it
                    connection.shutdown(socket.SHUT_RDWR)

    def service_actions(self) -> None:
        self.cut_off(self._deadline)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            # Without a free file descriptor the connection stays in the backlog. The pause prevents a busy loop.
            log.warning("cannot accept a connection: %s", error.strerror)
            time.sleep(ACCEPT_PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._accepted_at) >= MAX_CONNECTIONS:
            self.close_request(request)
            return
        self._accepted_at[request] = time.monotonic()
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        self._accepted_at.pop(request, None)
        super().close_request(request)

    def handle_error(self, *_: object) -> None:
        log.debug("a connection failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One request and its response."""

    server: _Server
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.1"  # a request that cannot be parsed gets a status line, too

    def do_GET(self) -> None:
        accept = ",".join(self.headers.get_all("Accept", []))
        try:
            response = self.server.respond(self.path.partition("?")[0], accept)
        except Exception:  # the server must answer the next request
            log.exception("request failed: path=%s", self.path[:64])
            response = _failure(http.HTTPStatus.INTERNAL_SERVER_ERROR)
        self._send(*response)

    def do_HEAD(self) -> None:
        self.do_GET()

    def send_error(self, code: int, *_: object, **__: object) -> None:
        self._send(*_failure(http.HTTPStatus(code)))

    def _send(self, status: http.HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response_only(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def finish(self) -> None:
        super().finish()
        # Closing a socket with unread bytes resets the connection, and the client may lose the response.
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while self.connection.recv(8192):
                pass
