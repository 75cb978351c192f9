"""A worker of several queues takes from them in their order at each priority, on whichever servers they are."""

import os
import signal
from collections.abc import Iterator

import pytest
import redis

from headrace_broker.keys import lease_meta_key, lease_records_key, leases_key, queue_lists
from headrace_broker.queue.leases import Leases
from headrace_broker.queue.worker_leases import WorkerLeases
from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import EmbeddedServer
from service.broker.tenant_messages import envelope, name_of
from service.servers import make_server

FIRST, SECOND = "headrace.first", "headrace.second"


@pytest.fixture
def other_server() -> Iterator[EmbeddedServer]:
    with make_server() as server:
        yield server


@pytest.fixture
def clients(redis_client: "redis.Redis", other_server: EmbeddedServer) -> Iterator[dict[str, "redis.Redis"]]:
    with connect(other_server.url) as other:
        yield {FIRST: redis_client, SECOND: other}


@pytest.fixture
def leases(clients: dict[str, "redis.Redis"]) -> WorkerLeases:
    main, other = (Leases(client, lease_seconds=60, delivery_limit=5) for client in clients.values())
    return WorkerLeases(main, {SECOND: other})


class Clock:
    """A clock that stands still until the test moves it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def take(leases: WorkerLeases, count: int, failed: dict[str, Exception] | None = None) -> list[str]:
    failed = {} if failed is None else failed
    taken = []
    for messages in leases.fetch_in_rounds([FIRST, SECOND], count, on_error=failed.__setitem__):
        for message in messages:
            leases.hold(message.lease_id, message)
            taken.append(name_of(message))
    return taken


def test_queues_are_served_in_their_order_at_each_priority(
    leases: WorkerLeases, clients: dict[str, "redis.Redis"]
) -> None:
    for queue, client in clients.items():
        for step, list_name in enumerate(queue_lists(queue)):
            client.lpush(list_name, envelope(f"{queue[9:]} {step} a"), envelope(f"{queue[9:]} {step} b"))
    in_order = [f"{queue} {step} {name}" for step in range(4) for queue in ("first", "second") for name in "ab"]
    taken = take(leases, 3) + take(leases, 1) + take(leases, 7)
    assert taken == in_order[:11]
    assert take(leases, 100) == in_order[11:]
    assert len(leases) == 16


def test_a_server_that_is_away_keeps_no_message_of_another_one_waiting(
    leases: WorkerLeases, clients: dict[str, "redis.Redis"], other_server: EmbeddedServer
) -> None:
    for queue, client in clients.items():
        client.lpush(queue_lists(queue)[1], envelope(queue))
        leases.of(queue).serve(queue)
    assert take(leases, 9) == [FIRST, SECOND]
    first, second = leases.held()
    other_server.kill()
    refused: list[str] = []
    leases.report_to(
        on_lost=lambda _: None,
        on_dead_letter=lambda _: None,
        on_refused=refused.append,
        token_seconds=lambda: None,
    )
    clients[FIRST].lpush(queue_lists(FIRST)[3], envelope("later"))
    failed: dict[str, Exception] = {}
    assert take(leases, 9, failed) == ["later"]
    assert failed.keys() == {SECOND}
    leases.tick()
    leases.reap()
    assert refused == []  # the fetch has reported it
    assert other_server.url.split("/")[2] in str(leases.away(SECOND))
    assert leases.reaped == {FIRST}
    leases.ack(first)
    leases.ack(second)  # it is retried
    assert (leases.of(FIRST).has(first), leases.of(SECOND).has(second)) == (False, True)


def test_a_server_that_hangs_is_tried_once_and_then_left_alone(
    redis_client: "redis.Redis", other_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, tried = Clock(), []
    with connect(other_server.url, timeout=0.1) as other, connect(other_server.url) as patient:
        execute = other.execute_command

        def counted(*args: object, **options: object) -> object:
            tried.append(args[0])
            return execute(*args, **options)

        monkeypatch.setattr(other, "execute_command", counted)
        main, hanging = (
            Leases(client, lease_seconds=15, delivery_limit=5, clock=clock) for client in (redis_client, other)
        )
        leases = WorkerLeases(main, {SECOND: hanging})
        hanging.serve(SECOND)
        patient.lpush(SECOND, *map(envelope, "abcdefgh"))
        redis_client.lpush(FIRST, envelope("main"))
        assert len(take(leases, 9)) == 9
        held = leases.held()
        tried.clear()
        os.kill(other_server.pid or 0, signal.SIGSTOP)
        try:
            for lease_id in held:
                leases.ack(lease_id)
            failed: dict[str, Exception] = {}
            assert take(leases, 9, failed) == []
            leases.reap()
            leases.sort([FIRST, SECOND])
            assert len(tried) == 1
            address = other_server.url.split("/")[2]
            assert str(leases.away(SECOND)).startswith(f"{SECOND} on {address}: ")
            leases.tick()  # the settlements: one try, whatever their number
            assert len(tried) == 2
            clock.now += 15.1
            leases.tick()
            assert len(tried) == 3
            leases.tick()  # its leases have expired, so it is left alone
            assert len(tried) == 3
        finally:
            os.kill(other_server.pid or 0, signal.SIGCONT)
        patient.ping()
        clock.now += 5.1
        leases.tick()
        assert not any(leases.of(SECOND).has(lease_id) for lease_id in held)
        assert patient.zcard(leases_key(SECOND)) == 0


def test_a_key_of_the_wrong_type_leaves_the_leases_of_other_queues_alone(redis_client: "redis.Redis") -> None:
    for key in (lease_meta_key(FIRST), lease_records_key(FIRST)):
        redis_client.flushall()
        holder, other = (Leases(redis_client, lease_seconds=60, delivery_limit=5) for _ in range(2))
        for queue in (FIRST, SECOND):
            holder.serve(queue)
            redis_client.lpush(queue, envelope(queue), envelope(f"{queue} abandoned"))
            message = holder.fetch(queue_lists(queue), 1)[0]
            holder.hold(message.lease_id, message)
            abandoned = other.fetch(queue_lists(queue), 1)[0]
        refused: list[str] = []
        holder.on_refused = refused.append
        redis_client.delete(key)
        redis_client.set(key, "x")
        redis_client.zadd(leases_key(SECOND), {abandoned.lease_id: 1.0, message.lease_id: 1.0})
        holder.tick()
        assert redis_client.zscore(leases_key(SECOND), message.lease_id) > 1.0
        assert holder.reap() == 1
        assert holder.reaped == {FIRST, SECOND}
        assert refused == [problem for problem in refused if key in problem] != []
        assert message.lease_id in holder.held()
        assert [again.lease_id for again in other.fetch(queue_lists(SECOND), 9)] == [abandoned.lease_id]
