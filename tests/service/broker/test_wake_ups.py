"""One message wakes one idle worker. If that worker cannot take the message, it wakes the next one."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from kombu import Connection, Consumer, Queue

from headrace_broker.app import LEASE_TRANSPORT
from headrace_broker.keys import arrived_key, wake_up_key
from headrace_broker.queue import blocking_wait, transport
from headrace_broker.queue.blocking_wait import wait_command, wake_up_command
from headrace_broker.queue.leases import Leases
from headrace_broker.queue.levels import QueueLevelReader, read_backlog, read_tenant_level
from headrace_broker.queue.purge import purge_queue
from headrace_broker.queue.request_search import is_known
from headrace_broker.queue.transport import Transport
from headrace_broker.queue.unread_lists import unread_lists
from headrace_broker.server.embedded import EmbeddedServer
from service.broker.tenant_messages import LISTS, QUEUE, envelope, names, push, take
from service.broker.test_event_loop import Loop, send  # noqa: F401  # a fixture

MANY_SECONDS = 3600.0


class Waiters:
    """Idle workers, each of which is only the connection of one blocking wait."""

    def __init__(self, client: "redis.Redis") -> None:
        self._client = client
        self._waiting: list[Any] = []

    def add(self, command: tuple[Any, ...], count: int = 1) -> None:
        before = self.num_blocked()
        for _ in range(count):
            connection = self._client.connection_pool.get_connection()
            self._waiting.append(connection)
            connection.send_command(*command[:-1], MANY_SECONDS)
        until(lambda: self.num_blocked() == before + count)

    def num_blocked(self) -> int:
        return int(self._client.info("clients")["blocked_clients"])

    def die(self) -> None:
        for connection in self._waiting:
            connection.disconnect()
        until(lambda: self.num_blocked() == 0)

    def close(self) -> None:
        for connection in self._waiting:
            connection.disconnect()
            self._client.connection_pool.release(connection)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never happened"


@pytest.fixture
def waiters(redis_client: "redis.Redis") -> Iterator[Waiters]:
    waiters = Waiters(redis_client)
    yield waiters
    waiters.close()


@pytest.fixture
def loop(redis_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    """An idle worker that never reaps. Its blocking waits, one a list and one for the wake-up token, are the oldest."""
    monkeypatch.setattr(blocking_wait, "WAIT_SECONDS", MANY_SECONDS)
    Transport.lease_registry._leases.clear()  # as if each test ran in a process of its own
    Transport.lease_registry._timers.clear()
    loop = Loop(redis_server.url, lease_seconds=60, reap_seconds=MANY_SECONDS)
    until_waiting(loop)
    yield loop
    loop.close()


def until_waiting(loop: Loop) -> None:
    """Run the loop until it has started its waits."""
    loop.hub.call_soon(lambda: None)  # or it would wait for an event
    loop.hub.run_once()


def test_a_message_wakes_one_of_all_idle_workers(waiters: Waiters, redis_client: "redis.Redis") -> None:
    waiters.add(wait_command(LISTS[0]), 5)
    push(redis_client, "a", ["x"])
    assert waiters.num_blocked() == 4
    assert redis_client.llen(arrived_key(LISTS[0])) == 1


def test_messages_that_a_fetch_leaves_wake_one_worker_after_the_other(
    make_leases: Callable[..., Leases], waiters: Waiters, redis_client: "redis.Redis"
) -> None:
    push(redis_client, "a", ["x", "y", "z"])
    waiters.add(wake_up_command(QUEUE), 3)
    leases = make_leases()
    for num_blocked in (2, 1):
        assert len(take(leases)) == 1
        assert waiters.num_blocked() == num_blocked
    assert names(take(leases)) == ["z"]
    assert waiters.num_blocked() == 1


def test_each_requeued_message_wakes_one_worker(
    make_leases: Callable[..., Leases], waiters: Waiters, redis_client: "redis.Redis"
) -> None:
    push(redis_client, "a", ["x", "y"])
    leases = make_leases()
    taken = take(leases, 2)
    waiters.add(wake_up_command(QUEUE), 3)
    for num_blocked, message in zip((2, 1), taken, strict=True):
        leases.requeue(message.lease_id)
        assert waiters.num_blocked() == num_blocked


def test_a_message_that_woke_a_worker_keeps_its_place(
    make_leases: Callable[..., Leases], waiters: Waiters, redis_client: "redis.Redis"
) -> None:
    waiters.add(wait_command(LISTS[0]), 2)
    push(redis_client, "a", ["first", "second", "third", "fourth"])
    assert redis_client.llen(arrived_key(LISTS[0])) == 2
    leases = make_leases()
    leases.wake(LISTS)
    assert redis_client.llen(LISTS[0]) == 4
    assert names(take(leases, 9)) == ["first", "second", "third", "fourth"]


@pytest.mark.parametrize("step", range(4))
def test_a_worker_without_free_slots_passes_a_new_message_on(
    loop: Loop, waiters: Waiters, redis_client: "redis.Redis", step: int
) -> None:
    loop.free_slots = 0
    waiters.add(wait_command(LISTS[step]))
    num_blocked = waiters.num_blocked()
    push(redis_client, "a", ["x"], step=step)
    loop.run_until(lambda: waiters.num_blocked() == num_blocked - 2)


def test_a_worker_without_free_slots_passes_the_wake_up_token_on(
    loop: Loop, make_leases: Callable[..., Leases], waiters: Waiters, redis_client: "redis.Redis"
) -> None:
    loop.free_slots = 0
    waiters.add(wake_up_command(QUEUE))
    num_blocked = waiters.num_blocked()
    push(redis_client, "a", ["x", "y"])
    take(make_leases())
    loop.run_until(lambda: waiters.num_blocked() == num_blocked - 3)


def test_a_worker_that_hands_over_passes_messages_on(
    loop: Loop, waiters: Waiters, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_TURN_SECONDS", 0.0)
    push(redis_client, "a", ["x"])
    loop.run_until(lambda: loop.channel.hands_over)
    waiters.add(wait_command(LISTS[3]))
    num_blocked = waiters.num_blocked()
    push(redis_client, "a", ["y"], step=3)
    loop.channel.on_wait(loop.channel._waits[wait_command(LISTS[3])])
    assert waiters.num_blocked() == num_blocked - 2


def test_a_worker_passes_messages_of_a_cancelled_queue_on(
    loop: Loop, waiters: Waiters, redis_client: "redis.Redis"
) -> None:
    """It takes messages of its other queue."""
    Consumer(loop.channel, [Queue("headrace.other")], on_message=loop.messages.append, accept=["msgpack"]).consume()
    for tag, queue in [*loop.channel._tag_to_queue.items()]:
        if queue == QUEUE:
            loop.channel.basic_cancel(tag)
    until_waiting(loop)
    until(lambda: waiters.num_blocked() == 10)  # five for each queue
    waiters.add(wait_command(LISTS[0]))
    num_blocked = waiters.num_blocked()
    push(redis_client, "a", ["x"])
    loop.run_until(lambda: waiters.num_blocked() == num_blocked - 2)


def test_a_message_whose_woken_worker_died_is_taken_by_another(
    waiters: Waiters,
    send: Callable[..., None],  # noqa: F811
    redis_server: EmbeddedServer,
    redis_client: "redis.Redis",
) -> None:
    waiters.add(wait_command(LISTS[0]))
    send("x")
    waiters.die()
    assert redis_client.llen(arrived_key(LISTS[0])) == 1
    loop = Loop(redis_server.url, lease_seconds=60)
    loop.run_until(lambda: len(loop.messages) == 1)
    loop.close()


def test_a_wake_up_token_that_was_lost_is_made_again(
    make_leases: Callable[..., Leases],
    send: Callable[..., None],  # noqa: F811
    redis_server: EmbeddedServer,
    redis_client: "redis.Redis",
) -> None:
    for number in range(2):
        send(number)
    take(make_leases())
    redis_client.delete(wake_up_key(QUEUE))
    loop = Loop(redis_server.url, lease_seconds=60)
    loop.run_until(lambda: len(loop.messages) == 1)
    loop.close()


@pytest.fixture
def arrived(waiters: Waiters, redis_client: "redis.Redis") -> None:
    """One message that woke a worker, and one that did not."""
    waiters.add(wait_command(LISTS[0]))
    for name in ("woke", "waits"):
        redis_client.lpush(LISTS[0], envelope(name, "a", id=name, enqueued_at=1.0 if name == "woke" else 2e9))
    assert redis_client.llen(arrived_key(LISTS[0])) == 1


@pytest.mark.usefixtures("arrived")
def test_a_message_that_woke_a_worker_is_counted_as_waiting(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    levels = QueueLevelReader(redis_client).read([QUEUE])[QUEUE]
    assert levels.num_ready == 2
    assert levels.oldest_age_seconds is not None
    assert levels.oldest_age_seconds > 1e9  # that of the message that woke a worker
    assert read_backlog(redis_client, QUEUE).num_ready == 2
    assert read_tenant_level(redis_client, QUEUE, "a", of_interest=2).num_ready == 2
    assert is_known(redis_client, "woke", [QUEUE])
    assert unread_lists(redis_client, [QUEUE]) == {QUEUE: {}}
    with Connection(redis_server.url, transport=LEASE_TRANSPORT) as connection:
        assert connection.channel()._size(QUEUE) == 2


@pytest.mark.usefixtures("arrived")
def test_a_message_that_woke_a_worker_is_purged(redis_client: "redis.Redis") -> None:
    assert purge_queue(redis_client, QUEUE, ttl_seconds=60).waiting == 2
    assert not redis_client.exists(LISTS[0], arrived_key(LISTS[0]))


@pytest.mark.usefixtures("arrived")
def test_celerys_purge_deletes_a_message_that_woke_a_worker(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    with Connection(redis_server.url, transport=LEASE_TRANSPORT) as connection:
        assert connection.channel().queue_purge(QUEUE) == 2
    assert not redis_client.exists(LISTS[0], arrived_key(LISTS[0]))
