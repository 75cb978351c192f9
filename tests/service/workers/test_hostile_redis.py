"""Redis that refuses writes, loses data or has wrong keys, and leases that run out."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from headrace_broker.queue.leases import Leases
from service.servers import make_server
from service.workers.service import Service, assert_result_is_stream, results
from service.workers.worker_process import WorkerProcess

pytestmark = pytest.mark.rotated(
    "broker/headrace_broker/queue",
    "broker/headrace_broker/server",
    "broker/headrace_broker/lua",
    "workers/headrace_workers/celery",
    "workers/headrace_workers/requests",
)

NUM_TOKENS = 600
LEASE_SECONDS = 1.5
HEARTBEAT = "headrace_worker_heartbeat_timestamp_seconds"


@pytest.fixture(scope="module")
def brief_leases(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Run one worker with short leases. Every test leaves it idle and its server unchanged."""
    with make_server() as server:
        service = Service(server, model_folder, tmp_path_factory.mktemp("brief"))
        try:
            service.start_worker(lease_seconds=LEASE_SECONDS).wait_ready()
            yield service
        finally:
            service.close()


@pytest.fixture
def service(brief_leases: Service) -> Iterator[Service]:
    brief_leases.wait_settled()
    yield brief_leases
    assert brief_leases.workers[0].process.poll() is None
    brief_leases.wait_settled(timeout=60)
    assert brief_leases.workers[0].metrics()["headrace_requests_in_flight"] == 0
    assert brief_leases.dead_letters() == []


def run(service: Service, count: int = 4) -> list[Any]:
    return [service.generate(f"the wheel {number}", max_tokens=NUM_TOKENS) for number in range(count)]


def contents(service: Service, handles: list[Any]) -> list[Any]:
    logs = service.wait_ended([handle.id for handle in handles])
    for request_id, result in results(handles).items():
        assert_result_is_stream(result, logs[request_id])
    return [logs[handle.id].content for handle in handles]


def test_a_redis_out_of_memory_delays_chunks_and_loses_no_lease(service: Service) -> None:
    expected = contents(service, run(service))
    worker = service.workers[0]
    handles = run(service)
    service.wait_tokens([handle.id for handle in handles], at_least=3)
    num_waits = worker.log_text().count("stream entries not written")
    service.client.config_set("maxmemory", 1)
    try:
        worker.wait_for_log("stream entries not written", count=num_waits + 1)
        service.client.script_flush()
        # longer than a lease: renewals must continue
        renewed = leases(service)
        service.wait_until(lambda: min(leases(service).values()) > max(renewed.values()) + LEASE_SECONDS)
    finally:
        service.client.config_set("maxmemory", 0)
    assert contents(service, handles) == expected
    assert all(len(service.stream(handle.id).attempts) == 1 for handle in handles)


def leases(service: Service) -> dict[bytes, float]:
    return dict(service.client.zrange("headrace:lease:leases:headrace.tiny", 0, -1, withscores=True))


@contextmanager
def read_only(service: Service) -> Iterator[None]:
    service.client.replicaof("127.0.0.1", "1")  # no such master: it keeps its data and refuses writes
    try:
        yield
    finally:
        service.client.replicaof("NO", "ONE")


@contextmanager
def failing_snapshots(service: Service) -> Iterator[None]:
    """Make the server refuse writes and even PING, because it cannot write its snapshot."""
    file = Path(service.client.config_get("dir")["dir"], "dump.rdb")
    file.unlink(missing_ok=True)
    file.mkdir()
    service.client.config_set("save", "3600 1000000")
    try:
        service.client.bgsave()
        service.wait_until(lambda: service.client.info("persistence")["rdb_last_bgsave_status"] == "err")
        yield
    finally:
        service.client.config_set("save", "")
        file.rmdir()


@pytest.mark.parametrize("refusing", [read_only, failing_snapshots])
def test_a_redis_that_refuses_writes_for_longer_than_a_lease_only_delays_chunks(
    service: Service, refusing: Callable[[Service], AbstractContextManager[None]]
) -> None:
    expected = contents(service, run(service))
    worker = service.workers[0]
    handles = run(service)
    service.wait_tokens([handle.id for handle in handles], at_least=3)
    pid = worker.engine_pid()
    os.kill(pid, signal.SIGSTOP)  # however fast the engine is, the requests last until Redis refuses
    with refusing(service):
        os.kill(pid, signal.SIGCONT)
        service.client.client_kill_filter(_type="normal", skipme=True)
        service.wait_until(lambda: max(leases(service).values()) + LEASE_SECONDS < service.client.time()[0])
        beat = worker.metrics()[HEARTBEAT]
        service.wait_until(lambda: worker.metrics()[HEARTBEAT] > beat)
    assert contents(service, handles) == expected
    assert all(len(service.stream(handle.id).attempts) == 1 for handle in handles)


def test_a_lost_lease_that_returns_to_the_same_worker_resumes_at_the_next_token(service: Service) -> None:
    expected = contents(service, run(service))
    worker = service.workers[0]
    handles = run(service)
    service.wait_tokens([handle.id for handle in handles], at_least=3)
    worker.send_signal(signal.SIGSTOP)
    try:
        service.client.zadd("headrace:lease:leases:headrace.tiny", dict.fromkeys(leases(service), 1.0))
        other = Leases(redis.Redis.from_url(service.server.url, protocol=2), lease_seconds=1, delivery_limit=5)
        assert other.reap("headrace.tiny") == len(handles)
    finally:
        worker.send_signal(signal.SIGCONT)
    assert contents(service, handles) == expected
    assert all(len(service.stream(handle.id).attempts) == 2 for handle in handles)


def test_rights_that_the_worker_loses_count_against_no_message_and_make_it_unready(service: Service) -> None:
    worker = service.workers[0]
    counted = counted_returns(worker)
    for command in ("zadd", "xadd", "setex"):  # they take a message, write its stream and store its result
        refused = re.compile(f"permissions? .*{command}|may not run {command}", re.IGNORECASE)
        service.client.execute_command("ACL", "SETUSER", "default", f"-{command}")
        try:
            handles = run(service)
            service.wait_until(lambda: refused.search(worker.health("ready")[1]))  # noqa: B023  # called here only
            assert worker.health("ready")[0] == 503
        finally:
            service.client.execute_command("ACL", "SETUSER", "default", f"+{command}")
        contents(service, handles)
    service.wait_until(lambda: worker.health("ready")[0] == 200)
    assert counted_returns(worker) == counted


def counted_returns(worker: WorkerProcess) -> float:
    """How many messages the worker returned with a counted delivery."""
    reasons = ("stream_refused", "result_not_stored", "fenced", "rolled_back")
    returned = worker.metrics()
    return sum(returned.get(f'headrace_queue_returned_messages_total{{reason="{reason}"}}', 0) for reason in reasons)


def test_a_password_that_changes_makes_the_worker_unready_until_it_is_right_again(service: Service) -> None:
    worker = service.workers[0]
    service.client.execute_command("ACL", "SETUSER", "default", "resetpass", ">another")
    try:
        service.client.client_kill_filter(_type="normal", skipme=True)
        service.wait_until(lambda: worker.health("ready")[0] == 503)
        service.wait_until(lambda: re.search("Authentication required|invalid username", worker.health("ready")[1]))
    finally:
        service.client.execute_command("ACL", "SETUSER", "default", "nopass")
    service.wait_until(lambda: worker.health("ready")[0] == 200)


def test_a_result_that_could_not_be_stored_is_stored_when_its_message_is_redelivered(service: Service) -> None:
    worker = service.workers[0]
    service.client.execute_command("ACL", "SETUSER", "default", "-setex")
    try:
        handle = service.generate(max_tokens=20)
        log = service.wait_ended([handle.id])[handle.id]
        worker.wait_for_log("could not be finished")
    finally:
        service.client.execute_command("ACL", "SETUSER", "default", "+setex")
    assert_result_is_stream(handle.get(timeout=60), log)
    assert service.stream(handle.id) == log


def test_delayed_messages_wait_in_redis_for_their_eta_and_run_once(service: Service) -> None:
    kwargs = {"prompt": "later", "sampling_params": {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}}
    for _ in range(40):  # more than the worker has slots
        service.send(kwargs, countdown=3000)
    handle = service.send(kwargs, countdown=2)
    service.wait_until(
        lambda: service.client.hvals("headrace:lease:meta:headrace.tiny").count(b"delayed|headrace.tiny") >= 40
    )
    service.cut_connections(service.workers[0])
    assert handle.get(timeout=150)["usage"]["completion_tokens"] == 5
    assert len(service.stream(handle.id).attempts) == 1
    service.wait_until(lambda: service.leased() == 40)
    assert ask(service, "engine_stats")["leases"] == 0
    service.client.delete(*service.client.keys("headrace:lease:*"))


def ask(service: Service, command: str) -> dict[str, Any]:
    with service.app.connection_for_write() as connection:
        [reply] = service.app.control.broadcast(command, reply=True, timeout=60, limit=1, connection=connection)
    [answer] = reply.values()
    return dict(answer)


def test_a_message_whose_eta_is_too_far_ahead_is_refused(service: Service) -> None:
    error = service.send({"prompt": "x"}, countdown=10 * 86400).get(timeout=150)["error"]
    assert error["code"] == "invalid_request"
    assert "at most 86400 s ahead" in error["message"]


def test_running_requests_can_be_revoked_after_a_lost_connection(service: Service) -> None:
    handle = service.generate(max_tokens=2000)
    service.wait_tokens([handle.id], at_least=1)
    pid = service.workers[0].engine_pid()
    os.kill(pid, signal.SIGSTOP)  # however fast the engine is, the request lasts until the worker is connected again
    try:
        service.cut_connections(service.workers[0])
        with service.app.connection_for_write() as connection:
            handle.revoke(connection=connection, terminate=True)
            assert service.app.control.ping(timeout=60, limit=1, connection=connection)
    finally:
        os.kill(pid, signal.SIGCONT)
    log = service.wait_ended([handle.id])[handle.id]
    assert log.end is not None
    assert log.end["finish_reason"] == "cancelled"


def test_a_redis_that_lost_everything_loses_running_requests_and_serves_later_ones(service: Service) -> None:
    handles = [service.generate(max_tokens=2000) for _ in range(2)]
    service.wait_tokens([handle.id for handle in handles], at_least=3)
    service.client.flushall()
    service.wait_until(lambda: service.workers[0].metrics()["headrace_requests_in_flight"] == 0)
    [content] = contents(service, run(service, 1))
    assert len(content[0].token_ids) == NUM_TOKENS


def test_a_worker_warns_at_each_connection_of_a_redis_that_may_evict_messages(service: Service) -> None:
    worker = service.workers[0]
    assert "maxmemory-policy" not in worker.log_text()
    service.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        service.cut_connections(worker)
        worker.wait_for_log("Redis has maxmemory-policy allkeys-lru: when it runs out of memory it evicts messages")
    finally:
        service.client.config_set("maxmemory-policy", "noeviction")


@pytest.mark.parametrize(
    "key",
    [
        "headrace:lease:record:headrace.tiny",
        "headrace.tiny\x06\x163",
        "headrace:queue:of:headrace.tiny\x06",
        "headrace:share:mean:headrace.tiny",
    ],
)
def test_a_key_of_the_wrong_type_makes_the_worker_unready_and_loses_no_request(service: Service, key: str) -> None:
    contents(service, run(service))  # kombu reads the lengths of a queue's lists before its first message
    kept = service.client.dump(key)
    service.client.delete(key)
    service.client.xadd(key, {"x": "y"})
    worker, shown = service.workers[0], key.replace("\x06\x16", " ").replace("\x06", " ")
    try:
        handles = run(service)
        words = f"WRONGTYPE the key {shown} holds a stream"
        service.wait_until(lambda: words in worker.health("ready")[1])
        assert worker.health("ready")[0] == 503
        assert worker.metrics()["headrace_queue_blocked"] == 1
    finally:
        service.client.delete(key)
        if kept is not None:
            service.client.restore(key, 0, kept)
    service.wait_until(lambda: worker.health("ready")[0] == 200)
    assert worker.metrics()["headrace_queue_blocked"] == 0
    service.wait_ended([handle.id for handle in handles])
