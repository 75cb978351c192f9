"""Reading many streams over one connection."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest
import redis

from headrace_broker.client.async_client import AsyncClient
from headrace_broker.client.client import Client
from headrace_broker.errors import ResultTimeoutError, StreamExpiredError
from headrace_broker.keys import stream_key
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.streams.events import ChunkEvent, EndEvent, StreamEvent
from headrace_broker.streams.writer import StreamWrite, StreamWriter


def write(writer: StreamWriter, request_id: str, count: int, *, end: bool = True) -> None:
    attempt = writer.claim(request_id, "test").attempt
    writes = [
        StreamWrite.chunk(request_id, attempt, n, index=0, token_ids=[n], text=f"{request_id}{n} ")
        for n in range(1, count + 1)
    ]
    writer.publish(writes + [StreamWrite.end(request_id, attempt, count, finish_reason="stop")] * end)


def test_every_event_arrives_once_and_in_the_order_of_its_stream(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    writer = StreamWriter(redis_client, 60)
    for request_id, count in (("a", 3), ("b", 1), ("c", 5)):
        write(writer, request_id, count)
    texts = dict.fromkeys("abc", "")
    ends = []
    with Client(redis_server.url) as client:
        for request_id, event in client.events_many("abc", timeout=5):
            if isinstance(event, ChunkEvent):
                texts[request_id] += event.text
            elif isinstance(event, EndEvent):
                ends.append(request_id)
    assert texts == {"a": "a1 a2 a3 ", "b": "b1 ", "c": "c1 c2 c3 c4 c5 "}
    assert sorted(ends) == ["a", "b", "c"]


async def test_each_stream_resumes_after_its_own_entry_even_if_one_has_ended(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    writer = StreamWriter(redis_client, 60)
    for request_id in "ab":
        write(writer, request_id, 3)
    async with AsyncClient(redis_server.url) as client:
        events = [
            (request_id, event.entry_id)
            async for request_id, event in client.events_many({"a": "1-2", "b": "1-4"}, timeout=5)
        ]
    assert events == [("a", "1-3"), ("a", "1-4")]


def publish_steps(writer: StreamWriter, request_ids: str, num_steps: int) -> Iterator[None]:
    """Write a token to each stream at each `next`, and their ends after the last one."""
    attempts = {request_id: writer.claim(request_id, "test").attempt for request_id in request_ids}
    yield
    for step in range(1, num_steps + 1):
        tokens: dict[str, Any] = {"index": 0, "token_ids": [step], "text": "t"}
        writer.publish([StreamWrite.chunk(name, attempt, step, **tokens) for name, attempt in attempts.items()])
        yield
    writer.publish(
        [StreamWrite.end(name, attempt, num_steps, finish_reason="stop") for name, attempt in attempts.items()]
    )


async def test_a_waiting_reader_gets_every_step_of_every_stream(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    async with AsyncClient(redis_server.url) as client:
        reading = client.events_many("abcdef", timeout=5)
        found = await read_by_steps(redis_client, "abcdef", lambda: anext(reading, None))
    assert found == {name: [f"1-{n}" for n in range(7)] for name in "abcdef"}


async def test_a_waiting_reader_without_an_event_loop_gets_them_too(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    with Client(redis_server.url) as client:
        reading = client.events_many("abcdef", timeout=5)
        found = await read_by_steps(redis_client, "abcdef", lambda: asyncio.to_thread(next, reading, None))
    assert found == {name: [f"1-{n}" for n in range(7)] for name in "abcdef"}


async def read_by_steps(
    redis_client: "redis.Redis", request_ids: str, read: Callable[[], Coroutine[Any, Any, Any]]
) -> dict[str, list[str]]:
    """Return the entry ids read from each stream, writing the next step whenever the reader waits."""
    steps = publish_steps(StreamWriter(redis_client, 60), request_ids, 5)
    found: dict[str, list[str]] = {name: [] for name in request_ids}
    while True:
        waiting = asyncio.create_task(read())
        while not waiting.done() and not redis_client.info("clients")["blocked_clients"]:
            await asyncio.sleep(0)
        if not waiting.done():
            next(steps, None)
        item = await waiting
        if item is None:
            return found
        name, event = item
        found[name].append(event.entry_id)


def last_items(items: Sequence[tuple[str, StreamEvent | StreamExpiredError]]) -> dict[str, type]:
    """Return the type of each stream's last item; an expired stream has no other item."""
    lasts = {request_id: type(item) for request_id, item in items}
    assert all(isinstance(item, StreamExpiredError) for request_id, item in items if request_id.startswith("expired"))
    return lasts


async def test_an_expired_stream_ends_and_the_others_continue(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    writer = StreamWriter(redis_client, 60)
    for request_id in ("expired", "expired while read", "served"):
        write(writer, request_id, 2)
    redis_client.delete(stream_key("expired"), stream_key("expired while read"))
    last_ids = {"expired": "0-0", "expired while read": "1-1", "served": "0-0", "begins late": "0-0"}
    expected = {"expired": StreamExpiredError, "expired while read": StreamExpiredError}
    expected |= {"served": EndEvent, "begins late": EndEvent}
    with Client(redis_server.url) as client:
        items = []
        for item in client.events_many(last_ids, timeout=60):
            items.append(item)
            if isinstance(item[1], StreamExpiredError) and not redis_client.exists(stream_key("begins late")):
                write(writer, "begins late", 1)
    assert last_items(items) == expected
    async with AsyncClient(redis_server.url) as async_client:
        assert last_items([item async for item in async_client.events_many(last_ids, timeout=60)]) == expected


def test_a_silent_stream_times_out_by_its_name(redis_server: EmbeddedServer, redis_client: "redis.Redis") -> None:
    write(StreamWriter(redis_client, 60), "talks", 1)
    with Client(redis_server.url) as client, pytest.raises(ResultTimeoutError, match="silent"):
        list(client.events_many(["talks", "silent"], timeout=0.05))


def test_reading_no_streams_ends_at_once(redis_server: EmbeddedServer) -> None:
    with Client(redis_server.url) as client:
        assert list(client.events_many([])) == []
