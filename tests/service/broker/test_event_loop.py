"""The lease transport on kombu's event loop, as inside a Celery worker."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from kombu import Connection, Consumer, Queue
from kombu.asynchronous import Hub

from headrace_broker.app import LEASE_TRANSPORT
from headrace_broker.keys import (
    ALL_STEPS,
    dead_letters_key,
    deputy_key,
    leases_key,
    queue_lists,
    reaper_key,
    wake_up_key,
)
from headrace_broker.queue import transport
from headrace_broker.queue.leases import Leases
from headrace_broker.queue.transport import Transport
from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import EmbeddedServer
from service.servers import make_server

QUEUE = Queue("headrace.m", exchange="", routing_key="headrace.m")


class Loop:
    """An event loop with one leased consumer. A test can make it reconnect."""

    def __init__(self, url: str, lease_seconds: float, *, reap_seconds: float = 0.05, **options: Any) -> None:
        self.url = url
        self.options = {"lease_seconds": lease_seconds, "unacked_restore_interval": reap_seconds, **options}
        self.hub = Hub()
        self.free_slots = 10
        self.messages: list[Any] = []
        self.connect()

    def connect(self) -> None:
        self.connection = Connection(self.url, transport=LEASE_TRANSPORT, transport_options=self.options)
        self.connection.transport.register_with_event_loop(self.connection.connection, self.hub)
        self.channel = self.connection.channel()
        self.channel.free_slots = lambda: self.free_slots
        Consumer(self.channel, [QUEUE], on_message=self.messages.append, accept=["msgpack"]).consume()

    def disconnect(self) -> None:
        self.connection.close()
        self.hub.reset()

    def run_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "it never happened"
            self.hub.run_once()

    def close(self) -> None:
        for message in self.messages:
            message.ack()
        self.disconnect()
        self.hub.close()


@pytest.fixture
def loop(redis_server: EmbeddedServer) -> Iterator[Loop]:
    Transport.lease_registry._leases.clear()  # as if each test ran in a process of its own
    Transport.lease_registry._timers.clear()
    loop = Loop(redis_server.url, lease_seconds=3.0)  # longer than a busy machine holds this process up
    yield loop
    loop.close()


@pytest.fixture
def send(redis_server: EmbeddedServer) -> Iterator[Callable[..., None]]:
    with Connection(redis_server.url) as connection:
        producer = connection.Producer(serializer="msgpack")
        yield lambda body, priority=0, **options: producer.publish(
            body, routing_key=QUEUE.name, exchange="", priority=priority, **options
        )


def turns_within(loop: Loop, seconds: float) -> int:
    turns, ends = 0, time.monotonic() + seconds
    while time.monotonic() < ends:
        loop.hub.run_once()
        turns += 1
    return turns


@pytest.mark.parametrize("priority", [0, 3, 9])
def test_a_message_of_any_priority_is_found_while_the_worker_is_idle(
    loop: Loop, send: Callable[..., None], priority: int
) -> None:
    for _ in range(3):
        loop.hub.run_once()
    send("x", priority)
    loop.run_until(lambda: len(loop.messages) == 1)


def test_a_waiting_message_does_not_keep_a_loop_without_free_slots_turning(
    loop: Loop, send: Callable[..., None]
) -> None:
    for _ in range(3):
        loop.hub.run_once()  # all blocking waits are started
    loop.free_slots = 0
    for priority in (0, 3, 6, 9):
        send("x", priority)
    assert turns_within(loop, 0.5) < 50  # a timer of this loop is due twenty times a second
    loop.free_slots = 10
    loop.run_until(lambda: len(loop.messages) == 4)


def test_messages_with_too_many_choices_do_not_keep_the_loop_turning_and_leave_small_ones_a_way(
    loop: Loop, send: Callable[..., None]
) -> None:
    below = 0
    loop.channel.split_below = lambda: below
    send("large", headers={"tenant": "a", "choices": 64})
    assert turns_within(loop, 0.5) < 50
    send("small", headers={"tenant": "b"})
    loop.run_until(lambda: bool(loop.messages))
    assert turns_within(loop, 0.5) < 50
    assert [message.decode() for message in loop.messages] == ["small"]
    below = ALL_STEPS
    loop.run_until(lambda: len(loop.messages) == 2)


def test_messages_that_another_worker_sorted_and_left_wake_an_idle_worker(
    loop: Loop, send: Callable[..., None], redis_client: "redis.Redis"
) -> None:
    loop.free_slots = 0
    for _ in range(3):
        loop.hub.run_once()
    for _ in range(3):
        send("x", 3)
    other = Leases(redis_client, lease_seconds=60, delivery_limit=5)
    (taken,) = other.fetch(queue_lists(QUEUE.name), 1)
    assert turns_within(loop, 0.3) < 50  # waiting messages do not keep it turning
    loop.free_slots = 10
    loop.run_until(lambda: len(loop.messages) == 2)
    assert turns_within(loop, 0.3) < 50  # nor does it turn when all messages are taken
    other.requeue(taken.lease_id)  # while it waits for the wake-up token
    loop.run_until(lambda: len(loop.messages) == 3)


def test_a_blocking_wait_whose_connection_was_closed_is_restarted(
    loop: Loop, send: Callable[..., None], redis_client: "redis.Redis"
) -> None:
    for _ in range(3):
        loop.hub.run_once()
    loop.free_slots = 0
    for step in (0, 3, 6, 9):
        send("x", step)
    redis_client.lpush(wake_up_key(QUEUE.name), "1")
    for _ in range(10):
        loop.hub.run_once()  # each wait is answered, and its message waits for a free slot
    redis_client.client_kill_filter(_type="normal", skipme=True)
    for _ in range(10):
        loop.hub.run_once()
    loop.free_slots = 10
    loop.run_until(lambda: len(loop.messages) == 4)


def test_held_messages_are_renewed_by_the_loop(
    loop: Loop, send: Callable[..., None], redis_client: "redis.Redis"
) -> None:
    send("x")
    loop.run_until(lambda: len(loop.messages) == 1)
    (lease_id,) = redis_client.zrange(leases_key(QUEUE.name), 0, -1)
    granted = redis_client.zscore(leases_key(QUEUE.name), lease_id)
    loop.run_until(lambda: redis_client.zscore(leases_key(QUEUE.name), lease_id) > granted + 1)
    assert len(loop.messages) == 1  # it was not delivered again


def test_a_message_waits_until_a_slot_is_free_again(loop: Loop, send: Callable[..., None]) -> None:
    for _ in range(3):
        loop.hub.run_once()
    loop.free_slots = 0
    send("x")
    for _ in range(10):
        loop.hub.run_once()
    assert loop.messages == []
    loop.free_slots = 1
    loop.run_until(lambda: len(loop.messages) == 1)


def test_the_loop_takes_over_the_messages_of_a_silent_worker(
    loop: Loop, send: Callable[..., None], redis_client: "redis.Redis"
) -> None:
    send("x")
    silent = Leases(redis_client, lease_seconds=0.1, delivery_limit=5)
    assert len(silent.fetch([QUEUE.name], 1)) == 1
    loop.run_until(lambda: len(loop.messages) == 1)
    assert loop.messages[0].delivery_info["redelivered"] is True


def test_after_a_reconnection_held_messages_are_kept_and_no_lease_is_reaped_at_once(
    loop: Loop, send: Callable[..., None], redis_client: "redis.Redis"
) -> None:
    send("x")
    loop.run_until(lambda: len(loop.messages) == 1)
    loop.disconnect()
    (lease_id,) = redis_client.zrange(leases_key(QUEUE.name), 0, -1)
    redis_client.zadd(
        leases_key(QUEUE.name), {lease_id: 1}
    )  # it expired during the outage, and so did another worker's
    redis_client.zadd(leases_key(QUEUE.name), {"of another worker": 1})
    loop.connect()
    assert redis_client.zscore(leases_key(QUEUE.name), lease_id) > 1
    assert redis_client.zscore(leases_key(QUEUE.name), "of another worker") == 1
    send("y")
    loop.run_until(lambda: len(loop.messages) == 2)
    loop.run_until(lambda: redis_client.zscore(leases_key(QUEUE.name), "of another worker") is None)
    assert [message.decode() for message in loop.messages] == ["x", "y"]


def test_work_continues_after_the_server_crashed() -> None:
    with make_server(appendonly=True) as server, connect(server.url) as client:
        loop = Loop(server.url, lease_seconds=60)
        with Connection(server.url) as connection:
            connection.Producer(serializer="msgpack").publish("x", routing_key=QUEUE.name, exchange="")
        loop.run_until(lambda: len(loop.messages) == 1)
        server.kill()
        with pytest.raises(loop.connection.connection_errors):
            loop.run_until(lambda: False)
        loop.messages[0].ack()  # pending, as the server is down
        loop.disconnect()
        server.start()
        loop.connect()
        roles = [key(QUEUE.name).encode() for key in (reaper_key, deputy_key)]  # they may not have expired yet
        assert [key for key in client.keys("headrace*") if not key.startswith((b"headrace:share:", *roles))] == []
        loop.messages.clear()
        loop.close()


def test_fetched_messages_are_handed_over_in_turns_of_the_loop_and_in_their_order(
    loop: Loop, send: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_TURN_SECONDS", 0.0)
    for number in range(6):
        send(number)
    most = 0
    while len(loop.messages) < 6:
        before = len(loop.messages)
        loop.hub.run_once()
        most = max(most, len(loop.messages) - before)
    assert most <= 2  # by the callback of the turn, and by another that is due
    assert [message.payload for message in loop.messages] == list(range(6))
    loop.run_until(loop.channel.qos.can_consume)


def test_fetched_messages_that_were_not_handed_over_go_back_with_their_connection(
    loop: Loop, send: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_TURN_SECONDS", 0.0)
    for number in range(6):
        send(number)
    loop.run_until(lambda: loop.channel.hands_over and loop.messages)
    held = len(loop.messages)
    assert 0 < held < 6
    loop.disconnect()
    loop.connect()
    loop.run_until(lambda: len(loop.messages) == 6)
    assert [message.payload for message in loop.messages] == list(range(6))
    assert not any(message.delivery_info["redelivered"] for message in loop.messages)


def test_the_loop_turns_between_the_steps_of_opening_a_message(
    loop: Loop, send: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_TURN_SECONDS", 0.0)
    steps: list[str] = []

    def noted(name: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def note(*given: Any) -> Any:
            steps.append(name)
            return do(*given)

        return note

    for name, do in {"open_envelope": transport.open_envelope, "content_digest": transport.content_digest}.items():
        monkeypatch.setattr(transport, name, noted(name, do))
    loop.channel.decode_body = noted("decode_body", loop.channel.decode_body)
    send("x")
    most = 0
    while not loop.messages:
        before = len(steps)
        loop.hub.run_once()
        most = max(most, len(steps) - before)
    assert steps[:3] == ["open_envelope", "content_digest", "decode_body"]
    assert most <= 2  # by the callback of the turn, and by another that is due


def test_a_half_opened_message_goes_back_with_its_connection(
    loop: Loop, send: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_TURN_SECONDS", 0.0)
    send("x")
    loop.run_until(lambda: loop.channel._parts is not None)
    loop.disconnect()
    loop.connect()
    loop.run_until(lambda: len(loop.messages) == 1)
    assert not loop.messages[0].delivery_info["redelivered"]


@pytest.mark.parametrize("mark", [b"[],", b"{},", b"1,"], ids=lambda mark: mark.decode())
def test_an_envelope_of_very_many_values_becomes_a_dead_letter_unread(
    loop: Loop, redis_server: EmbeddedServer, send: Callable[..., None], mark: bytes
) -> None:
    client = connect(redis_server.url)
    client.lpush(QUEUE.name, b'{"headers": {"id": "a", "x": [' + mark * 400_000 + b'1]}, "body": "", "properties": {}}')
    send("good")
    loop.run_until(lambda: [message.payload for message in loop.messages] == ["good"])
    (letter,) = client.lrange(dead_letters_key(QUEUE.name), 0, -1)
    assert b"its envelope holds more than 100000 values" in letter
    client.delete(dead_letters_key(QUEUE.name))
    client.close()
