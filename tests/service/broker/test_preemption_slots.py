"""Without free slots, a worker on kombu's event loop fetches messages of a better priority than its requests."""

import time
from collections.abc import Callable, Iterator

import pytest
import redis
from kombu import Connection

from headrace_broker.keys import sorted_ids_key
from headrace_broker.queue import blocking_wait
from headrace_broker.queue.transport import Transport
from headrace_broker.queue.worker_port import DELIVERY
from headrace_broker.server.embedded import EmbeddedServer
from service.broker.test_event_loop import QUEUE, Loop


@pytest.fixture
def loop(redis_server: EmbeddedServer) -> Iterator[Loop]:
    """A loop without a free slot, as if a request of step 9 and one of step 6 were running."""
    Transport.lease_registry._leases.clear()  # as if each test ran in a process of its own
    Transport.lease_registry._timers.clear()
    loop = Loop(redis_server.url, lease_seconds=60)
    loop.free_slots = 0
    loop.channel.preemptible_slots = lambda: (9, 1 - len(loop.messages))
    yield loop
    loop.close()


@pytest.fixture
def send(redis_server: EmbeddedServer) -> Iterator[Callable[..., None]]:
    with Connection(redis_server.url) as connection:
        producer = connection.Producer(serializer="msgpack")
        yield lambda body, priority=0: producer.publish(body, routing_key=QUEUE.name, exchange="", priority=priority)


def turn(loop: Loop, seconds: float = 0.2) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        loop.hub.call_soon(lambda: None)  # or it would wait for up to a second
        loop.hub.run_once()


@pytest.mark.parametrize("priority", [0, 3, 6])
def test_a_better_message_is_taken_without_a_free_slot(loop: Loop, send: Callable[..., None], priority: int) -> None:
    turn(loop)
    send("worse", 9)
    send("better", priority)
    loop.run_until(lambda: bool(loop.messages))
    (message,) = loop.messages
    assert message.decode() == "better"
    assert message.delivery_info[DELIVERY].step == priority


def test_no_more_messages_are_taken_than_preemption_makes_room_for(loop: Loop, send: Callable[..., None]) -> None:
    turn(loop)
    send("one")
    send("other")
    loop.run_until(lambda: bool(loop.messages))
    turn(loop)
    assert [message.decode() for message in loop.messages] == ["one"]


@pytest.fixture
def without_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the check once a second, and let no wait end without a message."""
    monkeypatch.setattr(blocking_wait, "_CHECK_SECONDS", 3600.0)
    monkeypatch.setattr(blocking_wait, "WAIT_SECONDS", 3600.0)


@pytest.mark.usefixtures("without_checks")
def test_better_messages_that_arrive_one_by_one_are_all_taken(loop: Loop, send: Callable[..., None]) -> None:
    loop.channel.preemptible_slots = lambda: (9, 5)
    loop.channel.preemption_wait_seconds = 0.05
    turn(loop)
    for number, priority in enumerate([0, 6, 0, 3, 0], 1):
        send(f"better {number}", priority)
        loop.run_until(lambda number=number: len(loop.messages) == number)  # type: ignore[misc]


@pytest.mark.usefixtures("without_checks")
def test_better_messages_that_found_no_room_are_taken_when_others_may_make_room(
    loop: Loop, send: Callable[..., None]
) -> None:
    """At first one request of step 9 may be preempted; later, when the better ones are prepared, those of step 6."""
    slots = [(9, 1)]
    loop.channel.preemptible_slots = lambda: (slots[0][0], max(0, slots[0][1] - len(loop.messages)))
    turn(loop)
    for number in range(3):
        send(f"better {number}")
    loop.run_until(lambda: bool(loop.messages))
    turn(loop)
    assert len(loop.messages) == 1
    slots[0] = (6, 3)
    loop.run_until(lambda: len(loop.messages) == 3)


def test_messages_of_no_better_priority_stay(loop: Loop, send: Callable[..., None]) -> None:
    loop.channel.preemptible_slots = lambda: (6, 1)
    turn(loop)
    send("equal", 6)
    send("worse", 9)
    turn(loop)
    assert loop.messages == []


def test_a_better_message_is_left_to_other_workers_for_a_while(loop: Loop, send: Callable[..., None]) -> None:
    waits: list[float] = []
    loop.channel.preemption_wait_seconds = 30.0
    call_later, loop.hub.call_later = loop.hub.call_later, lambda seconds, *rest: waits.append(seconds)
    turn(loop)
    send("better")
    turn(loop)
    loop.hub.call_later = call_later
    assert 30.0 in waits
    assert loop.messages == []


def test_room_that_appears_during_the_wait_is_used(loop: Loop, send: Callable[..., None]) -> None:
    turn(loop)
    loop.channel.preemption_wait_seconds = 0.05
    send("worse", 9)
    send("better")
    turn(loop, 0.02)
    loop.free_slots, loop.channel.preemptible_slots = 2, lambda: (0, 0)
    loop.run_until(lambda: len(loop.messages) == 2)
    assert [message.decode() for message in loop.messages] == ["better", "worse"]


def test_no_list_is_waited_for_if_nothing_may_be_preempted(loop: Loop, redis_client: "redis.Redis") -> None:
    loop.channel.preemptible_slots = lambda: (0, 0)
    turn(loop)
    assert [client for client in redis_client.client_list() if client["cmd"] == "blmove"] == []


def test_a_better_message_that_woke_no_wait_is_found_by_a_later_check(
    loop: Loop, send: Callable[..., None], redis_client: "redis.Redis"
) -> None:
    send("worse", 9)
    send("better")
    loop.channel.leases.sort([QUEUE.name])
    assert redis_client.zcard(sorted_ids_key(QUEUE.name)) == 1
    loop.channel.preemption_wait_seconds = 30.0
    loop.channel.schedule_preempting_fetch()
    turn(loop)
    assert loop.messages == []  # other workers may have room
    loop.channel._on_preemption_time()
    loop.run_until(lambda: bool(loop.messages))
    assert [message.decode() for message in loop.messages] == ["better"]
    assert not loop.channel.fetch_preempting()


def test_an_idle_loop_is_not_woken_while_it_waits_for_better_ones(loop: Loop, send: Callable[..., None]) -> None:
    turn(loop)
    turns = 0
    ends = time.monotonic() + 1.0
    while time.monotonic() < ends:
        loop.hub.run_once()
        turns += 1
    assert turns < 50
    send("worse", 9)
    turn(loop)
    assert loop.messages == []
