"""The health server over real HTTP on loopback, with clients that behave and clients that do not."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from headrace_monitoring import health
from headrace_monitoring.errors import HealthAddressError
from headrace_monitoring.exposition import ExpositionFormat
from headrace_monitoring.health import HealthServer, WorkerHealth
from headrace_monitoring.metrics import Metrics
from unit.monitoring.scrape import PROMETHEUS_ACCEPTS, Clock

Answer = tuple[int, dict[str, str], bytes]


@pytest.fixture
def worker(clock: Clock) -> WorkerHealth:
    return WorkerHealth(heartbeat_timeout=10, step_timeout=30, clock=clock)


@pytest.fixture
def server(metrics: Metrics, worker: WorkerHealth) -> Iterator[HealthServer]:
    with HealthServer(
        exposition=metrics.exposition,
        not_ready=worker.not_ready,
        not_alive=worker.not_alive,
        deadline_seconds=60,
    ) as running:
        yield running


def ask(server: HealthServer, path: str, method: str = "GET", accept: str | None = None) -> Answer:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    try:
        connection.request(method, path, headers={} if accept is None else {"Accept": accept})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def connect(server: HealthServer) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=60)


def send(server: HealthServer, request: bytes) -> bytes:
    with connect(server) as connection:
        connection.sendall(request)
        return connection.makefile("rb").read()


def test_metrics_are_served_as_prometheus_text(server: HealthServer) -> None:
    status, headers, body = ask(server, "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=")
    assert b'headrace_requests_in_flight{model="tiny"} 0.0' in body


def test_metrics_are_served_as_openmetrics_to_who_asks_for_it(server: HealthServer) -> None:
    _, headers, body = ask(server, "/metrics", accept=PROMETHEUS_ACCEPTS)
    assert headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert body.endswith(b"# EOF\n")
    assert not ask(server, "/metrics")[2].endswith(b"# EOF\n")  # not what was rendered for the other one a moment ago
    assert ask(server, "/metrics", accept=",;=,q=;\x00" + PROMETHEUS_ACCEPTS)[0] == 200


def test_ready_follows_the_worker(server: HealthServer, worker: WorkerHealth) -> None:
    status, _, body = ask(server, "/health/ready")
    assert status == 503
    assert json.loads(body) == {"status": "unavailable", "reason": "the worker is loading"}
    worker.state("ready")
    assert ask(server, "/health/ready")[0] == 200
    worker.state("draining")
    assert ask(server, "/health/ready")[0] == 503
    assert ask(server, "/health/live")[0] == 200


def test_live_is_refused_when_the_loop_is_stuck(server: HealthServer, worker: WorkerHealth, clock: Clock) -> None:
    worker.heartbeat(in_flight=0)
    assert json.loads(ask(server, "/health/live")[2]) == {"status": "ok"}
    clock.now += 60
    assert ask(server, "/health/live")[0] == 503


def test_head_gets_the_headers_alone(server: HealthServer) -> None:
    status, headers, body = ask(server, "/health/live", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 0


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /secret HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 501),
        (b"\x16\x03\x01\x02\r\n\r\n", 400),
        (b"GET /metrics HTTP/2x\r\n\r\n", 400),
        (b"GET /health/live?verbose=1 HTTP/1.0\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 2**17, 431),
    ],
)
def test_each_request_gets_the_status_it_deserves(server: HealthServer, request_bytes: bytes, status: int) -> None:
    assert send(server, request_bytes).startswith(b"HTTP/1.1 %d " % status)


def test_a_client_that_never_finishes_its_request_holds_up_nobody(server: HealthServer) -> None:
    with connect(server) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nHost:")
        assert ask(server, "/health/live")[0] == 200


def test_a_client_that_never_finishes_its_request_is_cut_off(metrics: Metrics, worker: WorkerHealth) -> None:
    hasty = HealthServer(
        exposition=metrics.exposition, not_ready=worker.not_ready, not_alive=worker.not_alive, deadline_seconds=0.1
    )
    with hasty as server, connect(server) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nHost:")
        assert slow.recv(1) == b""


def test_a_client_that_hangs_up_harms_nobody(server: HealthServer) -> None:
    connect(server).close()
    assert ask(server, "/health/live")[0] == 200


def test_more_connections_than_allowed_are_closed_at_once(metrics: Metrics, worker: WorkerHealth) -> None:
    patient = HealthServer(
        exposition=metrics.exposition, not_ready=worker.not_ready, not_alive=worker.not_alive, deadline_seconds=60
    )
    with patient as server, ExitStack() as held:
        for _ in range(health.MAX_CONNECTIONS):
            held.enter_context(connect(server))
        with connect(server) as refused:
            assert refused.recv(1) == b""


def test_a_failing_callable_is_an_error_for_its_asker_alone(worker: WorkerHealth) -> None:
    def broken(form: ExpositionFormat) -> bytes:
        raise RuntimeError("no metrics today")

    with HealthServer(exposition=broken, not_ready=worker.not_ready, not_alive=worker.not_alive) as server:
        status, _, body = ask(server, "/metrics")
        assert status == 500
        assert b"no metrics today" not in body
        assert ask(server, "/health/live")[0] == 200


def test_a_flood_of_scrapes_is_answered_from_one_rendering(
    worker: WorkerHealth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "RENDER_INTERVAL_SECONDS", 3600)
    renderings = []

    def render(form: ExpositionFormat) -> bytes:
        renderings.append(form)
        return b"headrace_up 1\n"

    with HealthServer(exposition=render, not_ready=worker.not_ready, not_alive=worker.not_alive) as server:
        answers = {ask(server, "/metrics")[2] for _ in range(5)}
    assert answers == {b"headrace_up 1\n"}
    assert len(renderings) == 1


def test_stop_frees_the_port_and_ends_the_thread(metrics: Metrics, worker: WorkerHealth) -> None:
    server = HealthServer(exposition=metrics.exposition, not_ready=worker.not_ready, not_alive=worker.not_alive)
    server.start()
    with connect(server) as idle:
        ask(server, "/health/live")  # the connection before it is accepted
        server.stop()
        assert idle.recv(1) == b""
    assert not [thread for thread in threading.enumerate() if thread.name == "headrace-health"]
    with pytest.raises(ConnectionRefusedError):
        connect(server)
    server.stop()


def test_a_taken_port_is_named_in_the_error(server: HealthServer, metrics: Metrics, worker: WorkerHealth) -> None:
    port = urlsplit(server.url).port
    assert port is not None
    second = HealthServer(
        exposition=metrics.exposition, not_ready=worker.not_ready, not_alive=worker.not_alive, port=port
    )
    with pytest.raises(HealthAddressError, match=rf"127\.0\.0\.1:{port}: .*in use"):
        second.start()
