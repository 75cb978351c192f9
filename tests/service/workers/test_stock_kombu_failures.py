"""Failures in which stock kombu loses or repeats messages, and the lease transport does not.

Each is a pair of tests. `..._stock_kombu` shows the failure on a plain Celery worker, with the safest settings that
Celery has. The other shows that a Headrace worker does not have it.
"""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from service.servers import make_server
from service.workers.messages import EMBED, message
from service.workers.service import QUEUE, Service, assert_result_is_stream
from service.workers.stock_worker import VISIBILITY_TIMEOUT, StockWorker, receipts
from service.workers.worker_process import WorkerProcess

pytestmark = pytest.mark.rotated_file

LEASE_SECONDS = 1.0
NUM_TOKENS = 400

GARBAGE = [b"\x00\xff garbage", b"[1]"]
ODD_BODIES = [[5, {}, EMBED], [[], 7, EMBED], 5]


@pytest.fixture(scope="module")
def shared(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Run a server with an append-only file, and a Headrace worker on it."""
    with make_server(appendonly=True) as server:
        service = Service(server, model_folder, tmp_path_factory.mktemp("leases"))
        try:
            yield service
        finally:
            service.close()


@pytest.fixture
def service(shared: Service) -> Iterator[Service]:
    """Provide the service with one running worker and no message."""
    shared.forget()
    if not shared.workers:
        shared.start_worker(lease_seconds=LEASE_SECONDS)
    shared.workers[0].wait_ready()
    shared.client.delete("headrace:dead:headrace.tiny")
    yield shared
    shared.wait_settled()


@pytest.fixture
def stock(make_service: Callable[..., Service], tmp_path: Path) -> Iterator[tuple[Service, StockWorker]]:
    """Run a server of its own and a stock worker on it. The service has no Headrace worker."""
    service = make_service()
    worker = StockWorker(service.server.url, tmp_path / "stock.log")
    service.workers.append(worker)
    yield service, worker.wait_ready()
    worker.close()


def has_no_message(service: Service) -> bool:
    """Whether stock kombu has no message at all: queued, or noted as delivered and not acknowledged."""
    return service.queued() == 0 and service.client.hlen("unacked") == 0


def renewals(service: Service) -> dict[bytes, float]:
    return dict(service.client.zrange("headrace:lease:leases:headrace.tiny", 0, -1, withscores=True))


def send(service: Service) -> list[Any]:
    return [service.generate(f"the wheel {number}", max_tokens=NUM_TOKENS) for number in range(4)]


def start(service: Service) -> list[Any]:
    """Start requests that run for a while."""
    handles = send(service)
    service.wait_tokens([handle.id for handle in handles], at_least=3)
    return handles


def assert_each_ran_once(service: Service, handles: list[Any]) -> None:
    undisturbed = send(service)
    logs = service.wait_ended([handle.id for handle in (*handles, *undisturbed)])
    for handle, other in zip(handles, undisturbed, strict=True):
        log = logs[handle.id]
        assert len(log.attempts) == 1
        assert log.num_tokens == NUM_TOKENS
        assert log.content == logs[other.id].content
        assert_result_is_stream(handle.get(timeout=60), log)
    service.wait_settled()
    assert service.dead_letters() == []


# 1. A request that runs for longer than the visibility timeout.


def test_1_a_live_request_is_received_again_and_again__stock_kombu(stock: tuple[Service, StockWorker]) -> None:
    service, _ = stock
    handle = service.send({"prompt": str(4 * VISIBILITY_TIMEOUT)})
    service.wait_until(lambda: receipts(service.client, handle.id) > 1)


def test_1_a_live_request_is_received_once_however_long_it_runs(service: Service) -> None:
    pid = service.workers[0].engine_pid()
    os.kill(pid, signal.SIGSTOP)  # the requests last as long as the test needs; their worker is not stopped
    try:
        handles = send(service)
        service.wait_until(lambda: len(renewals(service)) == len(handles))
        before = max(renewals(service).values())
        service.wait_until(lambda: min(renewals(service).values()) > before + 3 * LEASE_SECONDS)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert_each_ran_once(service, handles)


# 2. A worker that is stopped while it waits for messages, and then dies.


def send_to_the_stopped(service: Service, worker: WorkerProcess, prompt: str) -> Any:
    worker.send_signal(signal.SIGSTOP)
    return service.send({"prompt": prompt})


def test_2_a_message_is_lost_with_the_worker_that_waited_for_it__stock_kombu(
    stock: tuple[Service, StockWorker],
) -> None:
    service, worker = stock
    handle = send_to_the_stopped(service, worker, "0")
    service.wait_until(lambda: service.queued() == 0)  # the answer to BRPOP is in the socket of a stopped process
    worker.kill()
    assert has_no_message(service)
    assert receipts(service.client, handle.id) == 0


def test_2_a_message_survives_the_worker_that_waited_for_it(service: Service) -> None:
    worker = service.workers[0]
    handle = send_to_the_stopped(service, worker, "the wheel")
    worker.kill()
    assert service.queued() + service.leased() == 1
    service.start_worker(lease_seconds=LEASE_SECONDS)
    assert handle.get(timeout=150)["error"] is None
    assert len(service.stream(handle.id).attempts) == 1


# 3. CLIENT KILL of all connections, or a firewall that does the same.


def kill_connections(service: Service) -> None:
    service.client.client_kill_filter(_type="normal", skipme=True)
    service.client.client_kill_filter(_type="pubsub", skipme=True)


def test_3_running_requests_are_received_again_after_a_lost_connection__stock_kombu(
    stock: tuple[Service, StockWorker],
) -> None:
    service, _ = stock
    handles = [service.send({"prompt": "60"}) for _ in range(4)]
    service.wait_until(lambda: all(receipts(service.client, handle.id) for handle in handles))
    before = {handle.id: receipts(service.client, handle.id) for handle in handles}
    kill_connections(service)
    service.wait_until(lambda: any(receipts(service.client, name) > count for name, count in before.items()))


def test_3_running_requests_continue_after_a_lost_connection(service: Service) -> None:
    handles = start(service)
    worker = service.workers[0]
    lost = worker.log_text().count("Connection to broker lost")
    kill_connections(service)
    worker.wait_for_log("Connection to broker lost", count=lost + 1)
    assert_each_ran_once(service, handles)


# 4. kill -9 of Redis, which starts again.


def test_4_a_killed_redis_ends_the_worker__stock_kombu(stock: tuple[Service, StockWorker]) -> None:
    service, worker = stock
    handle = service.send({"prompt": "2"})
    service.wait_until(lambda: receipts(service.client, handle.id) > 0)
    service.server.kill()
    worker.wait()  # it ends although it got no signal
    assert "Unrecoverable error: AttributeError" in worker.log_text()
    service.server.start()


def test_4_a_killed_redis_delays_requests(service: Service) -> None:
    handles = start(service)
    service.server.kill()
    service.server.start()
    assert_each_ran_once(service, handles)
    assert service.workers[0].process.poll() is None


# 5. Messages that cannot be decoded.


@pytest.mark.parametrize("raw", GARBAGE)
def test_5_garbage_ends_the_worker_and_is_lost__stock_kombu(stock: tuple[Service, StockWorker], raw: bytes) -> None:
    service, worker = stock
    service.client.lpush(QUEUE, raw)
    worker.wait()
    assert has_no_message(service)


@pytest.mark.parametrize("raw", GARBAGE)
def test_5_garbage_becomes_a_dead_letter(service: Service, raw: bytes) -> None:
    service.client.lpush(QUEUE, raw)
    service.wait_until(lambda: service.dead_letters() != [])
    [letter] = service.dead_letters()
    assert letter[b"body"] == raw
    assert letter[b"reason"]
    assert service.generate().get(timeout=60)["error"] is None
    assert service.workers[0].process.poll() is None


# ... and one that is a message, but whose arguments are no list or no map.


def test_6_invalid_arguments_end_the_worker_and_the_next_one__stock_kombu(stock: tuple[Service, StockWorker]) -> None:
    service, worker = stock
    service.client.lpush(QUEUE, json.dumps(message(msgpack.packb(5))))
    worker.wait()
    assert not has_no_message(service)  # the message will end the next worker too


@pytest.mark.parametrize("body", ODD_BODIES, ids=str)
def test_6_invalid_arguments_are_answered(service: Service, body: Any) -> None:
    request_id = "odd-arguments"
    service.client.delete(f"headrace:stream:{request_id}", f"celery-task-meta-{request_id}")
    service.client.lpush(QUEUE, json.dumps(message(msgpack.packb(body), request_id=request_id)))
    result = service.handle(request_id).get(timeout=60)
    assert result["error"]["code"] == "invalid_request"
    log = service.wait_ended([request_id])[request_id]
    assert log.end is not None
    assert log.end["error"] == result["error"]
    assert service.generate().get(timeout=60)["error"] is None
    assert service.workers[0].process.poll() is None
