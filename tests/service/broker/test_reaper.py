"""One worker of a queue returns the messages of expired leases. If it dies or pauses, another one takes over."""

import time
from collections.abc import Callable, Iterator

import pytest
import redis

from headrace_broker.keys import (
    ELECTION_SECONDS,
    REAPER_MILLISECONDS,
    REAPER_SECONDS,
    RESTING_REAPER_MILLISECONDS,
    RESTING_REAPER_SECONDS,
    arrived_key,
    deputy_key,
    reaper_key,
)
from headrace_broker.queue import blocking_wait
from headrace_broker.queue.blocking_wait import wait_command
from headrace_broker.queue.leases import Leases
from headrace_broker.queue.transport import Transport
from headrace_broker.server.embedded import EmbeddedServer
from service.broker.tenant_messages import LISTS, QUEUE, push
from service.broker.test_event_loop import Loop
from service.broker.test_wake_ups import Waiters, until


@pytest.fixture
def make_worker(redis_client: "redis.Redis") -> Callable[..., Leases]:
    def make(queue: str = QUEUE, clock: Callable[[], float] = time.monotonic) -> Leases:
        leases = Leases(redis_client, lease_seconds=60, delivery_limit=5, clock=clock)
        leases.serve(queue)
        return leases

    return make


@pytest.fixture
def expire(redis_client: "redis.Redis") -> Callable[[], None]:
    """Return a function that lets a worker die with a leased message."""

    def expire() -> None:
        push(redis_client, "a", [f"message {time.monotonic_ns()}"])
        assert Leases(redis_client, lease_seconds=0.0, delivery_limit=99).fetch(LISTS, 1)

    return expire


def test_one_worker_of_a_queue_reaps(
    make_worker: Callable[..., Leases], expire: Callable[[], None], redis_client: "redis.Redis"
) -> None:
    now = 0.0
    reaper, other = make_worker(clock=lambda: now), make_worker(clock=lambda: now)
    assert reaper.reap() == other.reap() == 0
    redis_client.persist(reaper_key(QUEUE))  # this process may be slow
    expire()
    now += ELECTION_SECONDS
    assert other.reap() == 0
    assert reaper.reap() == 1


def test_another_worker_reaps_when_the_reaper_has_died(
    make_worker: Callable[..., Leases], expire: Callable[[], None], redis_client: "redis.Redis"
) -> None:
    make_worker().reap()
    expire()
    survivor = make_worker()
    began = time.monotonic()
    until(lambda: survivor.reap() == 1)
    assert time.monotonic() - began < 30
    assert redis_client.get(reaper_key(QUEUE)) == survivor.owner.encode()


def test_the_deputy_reaps_when_the_reaper_has_died(
    make_worker: Callable[..., Leases], expire: Callable[[], None], redis_client: "redis.Redis"
) -> None:
    now = 0.0
    reaper, deputy = make_worker(clock=lambda: now), make_worker(clock=lambda: now)
    assert reaper.reap() == deputy.reap() == 0
    assert redis_client.get(deputy_key(QUEUE)) == deputy.owner.encode()
    redis_client.delete(reaper_key(QUEUE))
    expire()
    now += RESTING_REAPER_SECONDS
    assert deputy.reap() == 1


@pytest.fixture
def asked(redis_client: "redis.Redis") -> Callable[[Leases], bool]:
    """Return a function that lets a worker reap, and returns whether it ran a script."""

    def reap(worker: Leases) -> bool:
        redis_client.config_resetstat()
        worker.reap()
        return bool(redis_client.info("commandstats").keys() & {"cmdstat_evalsha", "cmdstat_eval"})

    return reap


def test_beside_the_reaper_and_its_deputy_a_worker_seldom_asks_redis(
    make_worker: Callable[..., Leases], asked: Callable[[Leases], bool], redis_client: "redis.Redis"
) -> None:
    now = 0.0
    other = make_worker(clock=lambda: now)
    for key in (reaper_key(QUEUE), deputy_key(QUEUE)):
        redis_client.set(key, "another")
    assert asked(other)
    assert not asked(other)
    now += ELECTION_SECONDS
    assert asked(other)


def test_the_reaper_and_its_deputy_ask_half_as_often_while_there_is_no_message(
    make_worker: Callable[..., Leases],
    asked: Callable[[Leases], bool],
    expire: Callable[[], None],
    redis_client: "redis.Redis",
) -> None:
    def milliseconds() -> int:
        seconds, microseconds = redis_client.time()
        return seconds * 1000 + microseconds // 1000

    now, began = 0.0, milliseconds()
    reaper, deputy = make_worker(clock=lambda: now), make_worker(clock=lambda: now)
    for worker, key in ((reaper, reaper_key(QUEUE)), (deputy, deputy_key(QUEUE))):
        assert asked(worker)
        assert redis_client.pexpiretime(key) >= began + RESTING_REAPER_MILLISECONDS
    now += REAPER_SECONDS
    assert not asked(reaper)
    assert not asked(deputy)
    expire()
    now += REAPER_SECONDS
    assert reaper.reap() == 1
    now += REAPER_SECONDS
    assert asked(reaper)
    assert redis_client.pexpiretime(reaper_key(QUEUE)) <= milliseconds() + REAPER_MILLISECONDS


def test_a_worker_knows_whether_it_is_the_only_one_of_its_queues(
    make_worker: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    def later(worker: Leases, seconds: float) -> bool:
        nonlocal now
        now += seconds
        worker.reap()
        return worker.is_alone

    now = 0.0
    first, second = make_worker(clock=lambda: now), make_worker(clock=lambda: now)
    assert not later(first, 0.0)
    redis_client.persist(reaper_key(QUEUE))  # this process may be slow
    assert not later(first, ELECTION_SECONDS)
    assert later(first, ELECTION_SECONDS)
    assert not later(second, 0.0)
    redis_client.persist(deputy_key(QUEUE))
    assert not later(first, ELECTION_SECONDS)
    redis_client.delete(deputy_key(QUEUE))
    assert not later(first, ELECTION_SECONDS)
    assert later(first, 2 * ELECTION_SECONDS)


def test_a_worker_that_may_not_reap_remains_the_deputy(
    make_worker: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    paused = make_worker()
    paused.pause_reaping()
    paused.reap()
    assert redis_client.get(reaper_key(QUEUE)) is None
    assert redis_client.get(deputy_key(QUEUE)) == paused.owner.encode()


def test_a_worker_that_may_not_reap_leaves_it_to_another(
    make_worker: Callable[..., Leases], expire: Callable[[], None]
) -> None:
    paused, other = make_worker(), make_worker()
    paused.reap()
    expire()
    paused.pause_reaping()
    until(lambda: paused.reap() + other.reap() == 1)
    assert paused.reap() == 0


def test_a_worker_that_may_not_reap_returns_messages_whose_woken_worker_died(
    make_worker: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    redis_client.lpush(arrived_key(LISTS[0]), "message")
    paused = make_worker()
    paused.pause_reaping()
    paused.reap()
    assert redis_client.lrange(LISTS[0], 0, -1) == [b"message"]


def test_each_queue_has_a_reaper(make_worker: Callable[..., Leases], redis_client: "redis.Redis") -> None:
    first, second = make_worker(), make_worker("headrace.other")
    first.reap()
    second.reap()
    assert redis_client.get(reaper_key(QUEUE)) == first.owner.encode()
    assert redis_client.get(reaper_key("headrace.other")) == second.owner.encode()


def test_a_key_of_another_type_makes_every_worker_a_reaper(
    make_worker: Callable[..., Leases], expire: Callable[[], None], redis_client: "redis.Redis"
) -> None:
    redis_client.lpush(reaper_key(QUEUE), "x")
    make_worker().reap()
    expire()
    assert make_worker().reap() == 1


@pytest.fixture
def idle_loop(redis_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    """An idle worker whose blocking waits end after 20 ms."""
    Transport.lease_registry._leases.clear()  # as if each test ran in a process of its own
    Transport.lease_registry._timers.clear()
    monkeypatch.setattr(blocking_wait, "WAIT_SECONDS", 0.02)
    loop = Loop(redis_server.url, lease_seconds=60)
    yield loop
    loop.close()


def test_an_idle_worker_fetches_nothing_when_a_wait_ends(
    idle_loop: Loop, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches: list[object] = []
    fetch = idle_loop.channel.fetch
    monkeypatch.setattr(idle_loop.channel, "fetch", lambda: fetches.append(None) or fetch())
    idle_loop.run_until(lambda: redis_client.info("commandstats").get("cmdstat_blpop", {"calls": 0})["calls"] > 3)
    assert not fetches


def test_the_reaper_wakes_another_worker_for_a_message_whose_woken_worker_is_silent(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    waiters = Waiters(redis_client)
    waiters.add(wait_command(LISTS[0]))
    push(redis_client, "a", ["x"])
    assert redis_client.llen(arrived_key(LISTS[0])) == 1
    worker = Leases(redis_client, lease_seconds=60, delivery_limit=5)
    worker.serve(QUEUE)
    waiters.add(wait_command(LISTS[0]))
    worker.reap()
    assert waiters.num_blocked() == 0
    waiters.close()
