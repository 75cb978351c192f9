"""Subscriber heartbeats keep a request alive: against a real server, with both kinds of client."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import redis

from headrace_broker.client.async_client import AsyncClient
from headrace_broker.client.client import Client
from headrace_broker.errors import ResultTimeoutError, StreamExpiredError
from headrace_broker.keys import listener_key, result_key
from headrace_broker.packing import pack
from headrace_broker.results import RequestFailedError
from headrace_broker.server.connections import connect, connect_async
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.streams.events import ChunkEvent, StreamEvent
from headrace_broker.streams.hub import StreamHub
from headrace_broker.streams.listeners import Listeners
from headrace_broker.streams.writer import StreamWrite, StreamWriter

SUBSCRIBER = (
    "on nopass resetkeys resetchannels %R~headrace:stream:* %R~headrace:ended:* ~headrace:listener:*"
    " +@connection +xread +xrevrange +exists +get +expire"
)
"""The Redis rights of a subscriber, as in docs/wire.md."""


@pytest.fixture
def client(redis_server: EmbeddedServer) -> Client:
    return Client(redis_server.url, model="m")


def write(
    redis_client: "redis.Redis", request_id: str, *, end: bool = True, abandon_after: float | None = None
) -> None:
    """Write a stream of two chunks."""
    writer = StreamWriter(redis_client, 60)
    attempt = writer.claim(request_id, "w", abandon_after=abandon_after).attempt
    writer.publish(StreamWrite.chunk(request_id, attempt, n, index=0, token_ids=[n], text="t") for n in (1, 2))
    if end:
        write_end(redis_client, request_id)


def write_end(redis_client: "redis.Redis", request_id: str) -> None:
    StreamWriter(redis_client, 60).publish([StreamWrite.end(request_id, 1, 2, finish_reason="stop")])


def age(redis_client: "redis.Redis", request_id: str) -> None:
    """Shorten the key's life as if the last heartbeat was 50 s ago. Redis's own clock cannot be changed."""
    redis_client.expire(listener_key(request_id), 86_350)
    assert silent_seconds(redis_client, request_id) >= 50


def silent_seconds(redis_client: "redis.Redis", request_id: str) -> float:
    return Listeners(redis_client).silence({request_id: 90})[request_id]


@contextmanager
def ending_after_heartbeat(redis_client: "redis.Redis", request_id: str) -> Iterator[None]:
    """End the stream after a heartbeat, and not before."""

    def end() -> None:
        deadline = time.monotonic() + 60
        while silent_seconds(redis_client, request_id) >= 50 and time.monotonic() < deadline:
            time.sleep(0.01)
        write_end(redis_client, request_id)

    thread = threading.Thread(target=end)
    thread.start()
    yield
    thread.join()
    assert silent_seconds(redis_client, request_id) < 50


def read_all(client: Client, request_id: str) -> None:
    assert len(list(client.stream(request_id, timeout=60))) == 2


def resume(client: Client, request_id: str) -> None:
    assert len(list(client.stream(request_id, last_id="1-1", timeout=60))) == 1


def multiplex(client: Client, request_id: str) -> None:
    assert len(list(client.events_many([request_id, "other"], timeout=60))) == 8


def wait_for_the_result(client: Client, request_id: str) -> None:
    with pytest.raises(ResultTimeoutError):
        client.result(request_id, timeout=0.1)


@pytest.mark.parametrize("listen", [read_all, resume, multiplex, wait_for_the_result])
def test_subscribers_send_heartbeats_only_for_requests_with_abandon_after(
    client: Client, redis_client: "redis.Redis", listen: Callable[[Client, str], None]
) -> None:
    client.submit("x", request_id="wanted", abandon_after=90)
    client.submit("x", request_id="free")
    age(redis_client, "wanted")
    write(redis_client, "wanted", end=False, abandon_after=90)
    for request_id in ("free", "other"):
        write(redis_client, request_id)
    with ending_after_heartbeat(redis_client, "wanted"):
        listen(client, "wanted")
    listen(client, "free")
    assert not redis_client.exists(listener_key("free"), listener_key("other"))


async def test_the_asyncio_client_sends_heartbeats(redis_server: EmbeddedServer, redis_client: "redis.Redis") -> None:
    async with AsyncClient(redis_server.url, model="m") as client:
        await client.submit_many([{"prompt": "x", "request_id": "r", "abandon_after": 90}])
        age(redis_client, "r")
        with pytest.raises(ResultTimeoutError):
            await client.result("r", timeout=0.1)
        assert silent_seconds(redis_client, "r") < 50
        age(redis_client, "r")
        reader = asyncio.create_task(anext(client.stream("r", timeout=30)))
        while silent_seconds(redis_client, "r") >= 50:  # the subscriber comes before any worker
            await asyncio.sleep(0.01)
        write(redis_client, "r")
        assert (await reader).text == "t"


async def test_a_hub_sends_heartbeats_for_a_subscriber_that_takes_no_events(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    writer = StreamWriter(redis_client, 60)
    attempt = writer.claim("r", "w", abandon_after=90).attempt
    numbers = range(1, 2001)
    writer.publish(StreamWrite.chunk("r", attempt, n, index=0, token_ids=[n], text="t") for n in numbers)
    assert silent_seconds(redis_client, "r") < 50  # sets the key
    async with connect_async(redis_server.url) as connection:
        hub = StreamHub(connection)
        async with hub.subscribe({"r": "0-0"}) as subscription:
            for _ in range(3):  # at the first heartbeat the hub may still be reading
                age(redis_client, "r")
                async with asyncio.timeout(30):
                    while silent_seconds(redis_client, "r") >= 50:
                        await asyncio.sleep(0.01)
            taken: list[StreamEvent | StreamExpiredError] = []
            while len(taken) <= len(numbers):
                taken += [event for _, event in await subscription.take(30)]
        await hub.aclose()
    assert [event.offset for event in taken if isinstance(event, ChunkEvent)] == list(numbers)


def test_abandon_after_of_a_plain_producer_counts_from_the_claim(client: Client, redis_client: "redis.Redis") -> None:
    write(redis_client, "r", end=False, abandon_after=90)
    assert silent_seconds(redis_client, "r") < 50  # sets the key, as a worker does
    age(redis_client, "r")
    with ending_after_heartbeat(redis_client, "r"):
        read_all(client, "r")


def test_a_worker_that_hands_a_request_back_keeps_its_heartbeat_key(redis_client: "redis.Redis") -> None:
    for request_id in ("ended", "handed on"):
        write(redis_client, request_id, end=request_id == "ended", abandon_after=90)
        assert silent_seconds(redis_client, request_id) < 50  # sets the key
        age(redis_client, request_id)
    assert Listeners(redis_client).silence({"mine": 5}, forget=["ended", "handed on"])["mine"] < 5
    assert not redis_client.exists(listener_key("ended"))
    assert silent_seconds(redis_client, "handed on") >= 50


def test_the_documented_rights_are_enough_for_a_subscriber(
    client: Client, redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    client.submit("x", request_id="r", abandon_after=90)
    age(redis_client, "r")
    write(redis_client, "r", end=False)
    redis_client.execute_command("ACL", "SETUSER", "reader", *SUBSCRIBER.split())
    try:
        url = redis_server.url.replace("redis://", "redis://reader:x@")
        with Client(url) as reader, ending_after_heartbeat(redis_client, "r"):
            resume(reader, "r")
        with connect(url) as raw:
            for command in (
                ["SET", listener_key("r"), "1"],
                ["GET", "celery-task-meta-r"],
                ["XREAD", "STREAMS", "x", "0"],
            ):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    raw.execute_command(*command)
    finally:
        redis_client.execute_command("ACL", "DELUSER", "reader")


def test_a_repeated_submission_counts_as_a_heartbeat(client: Client, redis_client: "redis.Redis") -> None:
    client.submit("x", request_id="r", abandon_after=30)
    age(redis_client, "r")
    client.submit("x", request_id="r", abandon_after=30)
    assert silent_seconds(redis_client, "r") < 30


def test_waiting_for_a_result_keeps_its_interval_while_the_key_is_missing(
    client: Client, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_broker.streams.listeners.BLOCK_SECONDS", 600.0)  # the wait without the key

    def num_asked() -> int:
        return int(redis_client.info("commandstats").get("cmdstat_get", {"calls": 0})["calls"])

    client.submit("x", request_id="r", abandon_after=1)
    asked_before = num_asked()

    def wait() -> None:
        with pytest.raises(RequestFailedError):
            client.result("r")

    thread = threading.Thread(target=wait)
    thread.start()
    while num_asked() < asked_before + 2:
        time.sleep(0.01)
    redis_client.delete(listener_key("r"))
    deadline, asked_before = time.monotonic() + 60, num_asked()
    while num_asked() < asked_before + 6 and time.monotonic() < deadline:  # three reads of result and key
        time.sleep(0.01)
    has_asked = num_asked() >= asked_before + 6
    redis_client.set(result_key("r"), pack({"status": "FAILURE", "result": None}))
    thread.join()
    assert has_asked
