"""Who wakes up for a message that waits for its holder: the holder, and nobody else until the grace has ended."""

from collections.abc import Callable, Iterator

import pytest
import redis

from headrace_broker.keys import credit_key, holder_wake_up_key, wake_up_key
from headrace_broker.queue import blocking_wait, transport
from headrace_broker.queue.blocking_wait import holder_wake_up_command, wait_command, wake_up_command
from headrace_broker.queue.transport import LeaseRegistry, Transport
from headrace_broker.server.embedded import EmbeddedServer
from service.broker.tenant_messages import LISTS, QUEUE, names, take
from service.broker.test_event_loop import Loop
from service.broker.test_transport import envelope
from service.broker.test_wake_ups import MANY_SECONDS, Waiters, until
from service.fleet.conversations import FOR_EVER, end_grace, make_leases, send, turn

GRACE = 0.05


@pytest.fixture
def waiters(redis_client: "redis.Redis") -> Iterator[Waiters]:
    waiters = Waiters(redis_client)
    yield waiters
    waiters.close()


@pytest.fixture
def make_loop(redis_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Loop]]:
    """Return a function that makes an idle worker with leases of its own. It never reaps."""
    monkeypatch.setattr(blocking_wait, "WAIT_SECONDS", MANY_SECONDS)
    loops = []

    def make(grace: float = GRACE) -> Loop:
        monkeypatch.setattr(Transport, "lease_registry", LeaseRegistry())
        options = {"prefix_affinity": True, "prefix_grace": grace}
        loop = Loop(redis_server.url, lease_seconds=600, reap_seconds=MANY_SECONDS, **options)
        loops.append(loop)
        run(loop, 3)
        return loop

    yield make
    for loop in loops:
        loop.close()


def run(loop: Loop, turns: int) -> None:
    """Run the loop for so many turns, without waiting for events."""
    for _ in range(turns):
        loop.hub.call_later(0.01, lambda: None)
        loop.hub.run_once()


def real_turn(session: str, number: int, **headers: object) -> bytes:
    """Return a message that a consumer can decode."""
    continues = {"continues": f"{session}.{number - 1}"} if number else {}
    name = f"{session}.{number}"
    return envelope(
        headers={"task": "headrace.generate", "id": name, "tenant": "a", "conversation": name, **continues, **headers}
    )


def num_scripts(client: "redis.Redis") -> int:
    return sum(
        int(figures["calls"])
        for name, figures in client.info("commandstats").items()
        if name in ("cmdstat_evalsha", "cmdstat_eval")
    )


def dead_holder(client: "redis.Redis", *sessions: str) -> None:
    """Let a worker take the first turns of conversations and die. Its free slots are still believed."""
    leases = make_leases(client)
    send(client, *(real_turn(session, 0).decode() for session in sessions))
    assert len(take(leases, 4)) == len(sessions)
    client.set(credit_key(QUEUE, leases.owner), "4")


def test_a_message_wakes_the_first_worker_and_its_holder_and_no_other(
    waiters: Waiters, redis_client: "redis.Redis"
) -> None:
    holder, first = make_leases(redis_client), make_leases(redis_client)
    send(redis_client, turn("p", 0))
    take(holder, 4)
    waiters.add(wait_command(LISTS[0]), 2)
    waiters.add(wake_up_command(QUEUE), 3)
    waiters.add(holder_wake_up_command(QUEUE, holder.owner))
    waiters.add(holder_wake_up_command(QUEUE, first.owner))
    send(redis_client, turn("p", 1))
    assert waiters.num_blocked() == 6  # one that waits for the list was woken
    assert take(first, 4) == []
    assert waiters.num_blocked() == 5
    assert take(first, 4) == []
    assert waiters.num_blocked() == 5
    assert names(take(holder, 4)) == ["p.1"]
    assert waiters.num_blocked() == 5


def test_the_holder_takes_the_message_while_other_workers_wait(
    make_loop: Callable[..., Loop], redis_client: "redis.Redis"
) -> None:
    holder, other = make_loop(FOR_EVER), make_loop(FOR_EVER)
    other.free_slots = 0
    redis_client.lpush(QUEUE, real_turn("p", 0))
    holder.run_until(lambda: len(holder.messages) == 1)
    run(holder, 3)
    other.free_slots = 10
    send(redis_client, real_turn("p", 1).decode())
    assert not other.channel.fetch()  # as if the message had woken this worker
    holder.run_until(lambda: len(holder.messages) == 2)
    assert not other.messages


def test_the_worker_that_leaves_a_message_to_a_dead_holder_takes_it_after_the_grace_without_a_busy_loop(
    make_loop: Callable[..., Loop], redis_client: "redis.Redis"
) -> None:
    dead_holder(redis_client, "p")
    loop = make_loop()
    redis_client.config_resetstat()
    redis_client.lpush(QUEUE, real_turn("p", 1))
    loop.run_until(lambda: len(loop.messages) == 1)
    assert num_scripts(redis_client) <= 4


def test_a_worker_that_has_become_full_wakes_another_after_the_grace(
    make_loop: Callable[..., Loop], waiters: Waiters, redis_client: "redis.Redis"
) -> None:
    dead_holder(redis_client, "p")
    loop = make_loop(FOR_EVER)
    send(redis_client, real_turn("p", 1).decode())
    assert not loop.channel.fetch()
    loop.free_slots = 0
    run(loop, 5)  # it reads that the message has ended one of its waits
    redis_client.delete(wake_up_key(QUEUE))
    before = waiters.num_blocked()
    waiters.add(wake_up_command(QUEUE))
    loop.channel._on_grace_end()
    assert waiters.num_blocked() == before


def test_the_reaper_wakes_a_worker_if_the_one_that_left_the_message_has_died_too(
    waiters: Waiters, redis_client: "redis.Redis"
) -> None:
    dead_holder(redis_client, "p")
    send(redis_client, real_turn("p", 1).decode())
    assert take(make_leases(redis_client), 4) == []
    waiters.add(wake_up_command(QUEUE))
    reaper = make_leases(redis_client)
    reaper.serve(QUEUE)
    end_grace(redis_client)
    reaper.reap(QUEUE)
    assert waiters.num_blocked() == 0
    assert len(take(reaper, 4)) == 1


def test_a_holder_that_cannot_fetch_lets_another_worker_take_the_message_at_once(
    make_loop: Callable[..., Loop], redis_client: "redis.Redis"
) -> None:
    holder, other = make_loop(FOR_EVER), make_loop(FOR_EVER)
    other.free_slots = 0
    redis_client.lpush(QUEUE, real_turn("p", 0))
    holder.run_until(lambda: len(holder.messages) == 1)
    run(holder, 3)
    holder.free_slots, other.free_slots = 0, 10
    run(other, 3)
    send(redis_client, real_turn("p", 1).decode())
    other.channel.fetch()
    assert redis_client.persist(credit_key(QUEUE, holder.channel.leases.of(QUEUE).owner))  # or it would expire
    holder.run_until(lambda: not redis_client.exists(credit_key(QUEUE, holder.channel.leases.of(QUEUE).owner)))
    other.run_until(lambda: len(other.messages) == 1)


def test_a_holder_that_hands_over_takes_the_message_afterwards(
    make_loop: Callable[..., Loop], redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_TURN_SECONDS", 0.0)
    holder = make_loop(FOR_EVER)
    redis_client.lpush(QUEUE, real_turn("p", 0))
    holder.run_until(lambda: holder.channel.hands_over)
    send(redis_client, real_turn("p", 1).decode())
    redis_client.set(credit_key(QUEUE, holder.channel.leases.of(QUEUE).owner), "4")
    other = make_leases(redis_client)
    assert take(other, 4) == []
    holder.channel.on_wait(holder.channel._waits[holder_wake_up_command(QUEUE, holder.channel.leases.of(QUEUE).owner)])
    assert redis_client.llen(holder_wake_up_key(QUEUE, holder.channel.leases.of(QUEUE).owner)) == 1
    holder.run_until(lambda: len(holder.messages) == 2)


def test_an_idle_worker_tells_its_free_slots_and_a_full_one_does_not(
    make_loop: Callable[..., Loop], redis_client: "redis.Redis"
) -> None:
    loop = make_loop()
    key = credit_key(QUEUE, loop.channel.leases.of(QUEUE).owner)
    until(lambda: redis_client.get(key) == b"10")
    redis_client.delete(key)
    loop.channel.leases.of(QUEUE).slots._tell_from.clear()  # two seconds later
    loop.run_until(lambda: redis_client.get(key) == b"10")  # though nothing happens
    loop.free_slots = 0
    redis_client.delete(key)
    run(loop, 5)
    assert not redis_client.exists(key)
