"""The lease transport inside kombu, with stock producers on the other side and no Celery worker."""

import base64
import json
import socket
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import redis
from kombu import Connection, Consumer, Queue

from headrace_broker.app import LEASE_TRANSPORT
from headrace_broker.errors import TransportConfigurationError
from headrace_broker.keys import leases_key, sorted_ids_key
from headrace_broker.queue.dead_letters import dead_letters
from headrace_broker.queue.transport import Transport
from headrace_broker.server.embedded import EmbeddedServer
from service.servers import make_server

QUEUE = Queue("headrace.m", exchange="", routing_key="headrace.m")


class Inbox:
    """A consumer of the lease transport that keeps its messages."""

    def __init__(self, url: str, **options: Any) -> None:
        self.connection = Connection(url, transport=LEASE_TRANSPORT, transport_options={"lease_seconds": 60, **options})
        self.channel = self.connection.channel()
        self.messages: list[Any] = []
        self.consumer = Consumer(self.channel, [QUEUE], on_message=self.receive, accept=["msgpack"])
        self.consumer.consume()

    def receive(self, message: Any) -> None:
        self.messages.append(message)

    def drain(self) -> list[Any]:
        """Fetch without a blocking wait, and return the messages so far."""
        self.messages.clear()
        while self.channel.fetch():
            pass
        return list(self.messages)


@pytest.fixture
def inbox(redis_server: EmbeddedServer) -> Iterator[Inbox]:
    inbox = Inbox(redis_server.url)
    inbox.channel.free_slots = lambda: 100
    yield inbox
    for message in inbox.messages:
        if not message.acknowledged:
            message.ack()
    inbox.connection.close()


@pytest.fixture
def producer(redis_server: EmbeddedServer) -> Iterator[Any]:
    with Connection(redis_server.url) as connection:
        yield connection.Producer(serializer="msgpack")


def leftovers(client: "redis.Redis") -> list[bytes]:
    """Return every key but the service of tenants, which is kept for a day."""
    return [key for key in client.keys("headrace*") if not key.startswith(b"headrace:share:")]


def send(producer: Any, body: Any, priority: int = 0) -> None:
    producer.publish(body, routing_key=QUEUE.name, exchange="", priority=priority)


def test_messages_of_a_stock_producer_arrive_and_are_acknowledged(
    inbox: Inbox, producer: Any, redis_client: "redis.Redis"
) -> None:
    send(producer, {"number": 1}, priority=9)
    send(producer, {"number": 0})
    messages = inbox.drain()
    assert [message.decode() for message in messages] == [{"number": 0}, {"number": 1}]
    assert redis_client.zcard(leases_key(QUEUE.name)) == 2
    for message in messages:
        message.ack()
    assert leftovers(redis_client) == []


@pytest.mark.parametrize("priority", [0, 3, 6, 9])
def test_a_message_in_any_list_wakes_a_waiting_consumer(inbox: Inbox, producer: Any, priority: int) -> None:
    with pytest.raises(socket.timeout):
        inbox.connection.drain_events(timeout=0.01)  # starts the blocking waits
    send(producer, "ding", priority)
    inbox.connection.drain_events(timeout=60)
    assert [message.decode() for message in inbox.messages] == ["ding"]


def test_a_blocking_wait_does_not_change_the_order(inbox: Inbox, producer: Any) -> None:
    for number in range(3):
        send(producer, number)
    inbox.connection.drain_events(timeout=60)
    assert [message.decode() for message in inbox.messages] == [0, 1, 2]


def test_without_a_free_slot_messages_stay_in_the_queue(
    inbox: Inbox, producer: Any, redis_client: "redis.Redis"
) -> None:
    for number in range(3):
        send(producer, number)
    inbox.channel.free_slots = lambda: 0
    assert inbox.drain() == []
    assert not inbox.channel.qos.can_consume()
    inbox.channel.free_slots = lambda: 2 - len(inbox.messages)
    assert len(inbox.drain()) == 2
    assert redis_client.zcard(sorted_ids_key(QUEUE.name)) == 1


def test_without_an_engine_the_prefetch_count_is_the_number_of_free_slots(
    redis_server: EmbeddedServer, producer: Any
) -> None:
    inbox = Inbox(redis_server.url)
    inbox.channel.basic_qos(0, 2, False)
    for number in range(3):
        send(producer, number)
    messages = inbox.drain()
    assert [message.decode() for message in messages] == [0, 1]
    messages[0].ack()
    assert [message.decode() for message in inbox.drain()] == [2]
    for message in (messages[1], *inbox.messages):
        message.ack()
    inbox.connection.close()


def test_a_requeued_message_comes_again_and_a_rejected_one_is_a_dead_letter(
    inbox: Inbox, producer: Any, redis_client: "redis.Redis"
) -> None:
    send(producer, "again")
    (message,) = inbox.drain()
    assert message.delivery_info["redelivered"] is False
    message.requeue()
    (message,) = inbox.drain()
    message.reject()
    assert inbox.drain() == []
    assert [letter.reason for letter in dead_letters(redis_client, QUEUE.name)] == ["rejected"]


def test_a_message_whose_worker_fell_silent_is_marked_as_redelivered(
    inbox: Inbox, producer: Any, redis_client: "redis.Redis"
) -> None:
    send(producer, "x")
    (message,) = inbox.drain()
    inbox.channel.leases.requeue(message.delivery_tag, is_counted=True)
    (again,) = inbox.drain()
    assert again.delivery_info["redelivered"] is True


def envelope(**changes: Any) -> bytes:
    message: dict[str, Any] = {
        "body": base64.b64encode(msgpack.packb("fine")).decode(),
        "content-type": "application/x-msgpack",
        "content-encoding": "binary",
        "headers": {"task": "headrace.generate", "id": "request-1"},
        "properties": {"delivery_tag": "1", "delivery_info": {}, "body_encoding": "base64"},
    }
    return json.dumps({key: value for key, value in (message | changes).items() if value is not None}).encode()


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xff\xfe",
        b"5",
        b"[1]",
        b"null",
        b"{}",
        b"[" * 100_000,
        envelope(properties=None),
        envelope(properties=5),
        envelope(properties={"delivery_tag": "1"}),
        envelope(properties={"delivery_info": {}, "body_encoding": "rot13"}),
        envelope(headers=None),
        envelope(headers=[1]),
        envelope(body="not base64!"),
        envelope(body=5),
        envelope(body="\ud800" * 10, properties={"delivery_info": {}}),
    ],
)
def test_garbage_becomes_a_dead_letter_and_the_next_message_arrives(
    inbox: Inbox, redis_client: "redis.Redis", garbage: bytes
) -> None:
    redis_client.lpush(QUEUE.name, garbage, envelope())
    (message,) = inbox.drain()
    assert message.decode() == "fine"
    (letter,) = dead_letters(redis_client, QUEUE.name)
    assert letter.reason.startswith("undecodable: ")
    assert letter.body == garbage


def test_two_messages_with_one_delivery_tag_are_acknowledged_separately(
    inbox: Inbox, redis_client: "redis.Redis"
) -> None:
    redis_client.lpush(QUEUE.name, envelope(), envelope(headers={"id": "request-2"}))
    first, second = inbox.drain()
    first.ack()
    assert [message.delivery_tag.encode() for message in (second,)] == redis_client.zrange(
        leases_key(QUEUE.name), 0, -1
    )


def test_a_consumer_that_fails_on_one_message_gets_the_others(
    inbox: Inbox, producer: Any, redis_client: "redis.Redis", caplog: pytest.LogCaptureFixture
) -> None:
    def receive(message: Any) -> None:
        text = message.decode()
        if text != "fine":
            raise TypeError(f"cannot work on {text}")
        inbox.messages.append(message)

    inbox.consumer.on_message = receive
    send(producer, "secret prompt")
    send(producer, "fine")
    assert [message.decode() for message in inbox.drain()] == ["fine"]
    assert [letter.reason for letter in dead_letters(redis_client, QUEUE.name)] == ["undeliverable: TypeError"]
    assert "secret" not in caplog.text


def test_a_broken_connection_while_delivering_loses_nothing(
    inbox: Inbox, producer: Any, redis_client: "redis.Redis"
) -> None:
    def receive(_message: Any) -> None:
        raise ConnectionResetError("the event connection broke")

    inbox.consumer.on_message = receive
    for number in range(3):
        send(producer, number)
    with pytest.raises(ConnectionResetError):
        inbox.drain()
    assert len(inbox.channel.leases) == 0
    inbox.consumer.on_message = inbox.receive
    messages = inbox.drain()
    assert [(message.decode(), message.delivery_info["redelivered"]) for message in messages] == [
        (0, True),
        (1, False),
        (2, False),
    ]


def test_a_consumer_prefers_messages_with_the_prefix_of_earlier_ones(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    Transport.lease_registry._leases.clear()  # or the options of an earlier test would apply
    inbox = Inbox(redis_server.url, prefix_affinity=True)
    for name, prefix in (("1", "p"), ("2", "q"), ("3", "p"), ("4", "\ud800"), ("5", "p" * 33)):
        redis_client.lpush(QUEUE.name, envelope(headers={"task": "headrace.generate", "id": name, "prefix": prefix}))
    inbox.channel.free_slots = lambda: 1
    for _ in range(5):
        inbox.channel.fetch()
    assert [message.headers["id"] for message in inbox.messages] == ["1", "3", "2", "4", "5"]
    inbox.channel.fetch()  # their prefixes are invalid, and are not sent to the server
    for message in inbox.messages:
        message.ack()
    inbox.connection.close()
    Transport.lease_registry._leases.clear()


def test_leases_outlive_the_connection_that_fetched_them(
    redis_server: EmbeddedServer, producer: Any, redis_client: "redis.Redis"
) -> None:
    send(producer, "x")
    first = Inbox(redis_server.url)
    (message,) = first.drain()
    first.connection.close()
    assert redis_client.llen(QUEUE.name) == 0  # closing requeued nothing
    second = Inbox(redis_server.url)
    assert second.channel.leases is first.channel.leases
    assert len(second.channel.leases) == 1
    message.ack()
    assert leftovers(redis_client) == []
    second.connection.close()


def test_each_database_has_leases_of_its_own(redis_server: EmbeddedServer) -> None:
    one = Connection(redis_server.url, transport=Transport)
    two = Connection(redis_server.url.replace("/0", "/1"), transport=Transport)
    with one, two:
        assert one.channel().leases is not two.channel().leases
        assert one.channel().leases is one.channel().leases


def test_a_channel_is_leased_wholly_or_not_at_all(inbox: Inbox) -> None:
    plain = Consumer(inbox.channel, [Queue("celery", exchange="", routing_key="celery")])
    with pytest.raises(TransportConfigurationError, match=r"headrace\.m, celery cannot share a channel"):
        plain.consume()


def test_a_queue_may_be_leased_by_name(redis_server: EmbeddedServer) -> None:
    with Connection(
        redis_server.url, transport=Transport, transport_options={"lease_queues": ["celery"]}
    ) as connection:
        channel = connection.channel()
        Consumer(channel, [Queue("celery", exchange="", routing_key="celery")]).consume()
        assert channel.leased


def test_a_leased_queue_requires_acknowledgement(inbox: Inbox) -> None:
    careless = Consumer(inbox.connection.channel(), [QUEUE], no_ack=True)
    with pytest.raises(TransportConfigurationError, match="must be acknowledged"):
        careless.consume()


def test_a_leased_queue_is_not_popped_from(inbox: Inbox) -> None:
    with pytest.raises(TransportConfigurationError):
        inbox.channel.basic_get(QUEUE.name)


def test_a_global_key_prefix_is_refused(redis_server: EmbeddedServer) -> None:
    options = {"global_keyprefix": "x:"}
    connection = Connection(redis_server.url, transport=Transport, transport_options=options)
    with connection, pytest.raises(TransportConfigurationError, match="global_keyprefix"):
        connection.channel()


def test_closing_a_channel_puts_nothing_back_when_the_server_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with make_server() as server:
        connection = Connection(server.url, transport=Transport)
        messages: list[Any] = []
        queue = Queue("reply", exchange="", routing_key="reply")
        Consumer(connection.channel(), [queue], on_message=messages.append, accept=["json"]).consume()
        connection.Producer().publish("pong", routing_key="reply", exchange="")
        connection.drain_events(timeout=60)
        server.kill()
        connection.transport.close_connection(connection.connection)
    assert caplog.text == ""  # kombu would try to restore the message, fail, and dump it into a file


def test_other_queues_are_handled_by_kombu(redis_server: EmbeddedServer, producer: Any) -> None:
    replies: list[Any] = []
    with Connection(redis_server.url, transport=Transport) as connection:
        queue = Queue("reply", exchange="", routing_key="reply")
        consumer = Consumer(connection.channel(), [queue], on_message=replies.append, accept=["msgpack"])
        consumer.consume()
        producer.publish("pong", routing_key="reply", exchange="")
        connection.drain_events(timeout=60)
        replies[0].ack()
        assert replies[0].decode() == "pong"
        assert len(connection.default_channel.leases) == 0
