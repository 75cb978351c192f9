"""The hub on a real server: streams are added and removed during reads, and subscribers are slow, many or late."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from unittest.mock import Mock

import pytest
import redis

from headrace_broker.errors import (
    MalformedEntryError,
    ResultTimeoutError,
    StreamExpiredError,
    TooManySubscribersError,
)
from headrace_broker.keys import stream_key
from headrace_broker.server.connections import connect_async
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.streams import following
from headrace_broker.streams import hub as hub_module
from headrace_broker.streams.events import ChunkEvent, EndEvent
from headrace_broker.streams.grant import Grant
from headrace_broker.streams.hub import MAX_SUBSCRIBERS, StreamHub, Subscription
from headrace_broker.streams.writer import StreamWrite, StreamWriter
from service.servers import make_server

TIMEOUT = 30.0
"""Seconds; only a failing test waits that long."""


@pytest.fixture
def writer(redis_client: "redis.Redis") -> StreamWriter:
    return StreamWriter(redis_client, 60)


@asynccontextmanager
async def running_hub(url: str, *, max_outage: float = TIMEOUT) -> AsyncIterator[StreamHub]:
    async with connect_async(url) as connection:
        hub = StreamHub(connection, max_outage_seconds=max_outage)
        try:
            yield hub
        finally:
            await hub.aclose()


def write(writer: StreamWriter, request_id: str, first: int, last: int, *, end: bool = False) -> None:
    """Write the tokens from `first` to `last`; token 1 begins the stream."""
    if first == 1:
        writer.claim(request_id, "w")
    numbers = range(first, last + 1)
    writes = [StreamWrite.chunk(request_id, 1, n, index=0, token_ids=[n], text="t") for n in numbers]
    writer.publish(writes + [StreamWrite.end(request_id, 1, last, finish_reason="stop")] * end)


async def take_until(subscription: Subscription, offset: int, *, end: bool = False) -> list[int]:
    """Return the offsets of the tokens that arrive up to `offset`, or up to the end."""
    taken: list[int] = []
    has_ended = False
    while not (has_ended if end else taken and taken[-1] >= offset):
        events = await subscription.take(TIMEOUT)
        assert events, f"nothing came behind {taken[-1:]}"
        taken += [event.offset for _, event in events if isinstance(event, ChunkEvent)]
        has_ended |= any(isinstance(event, EndEvent) for _, event in events)
    return taken


async def wait_blocked(client: "redis.Redis") -> None:
    """Wait until the hub blocks in Redis."""
    async with asyncio.timeout(TIMEOUT):
        while not client.info("clients")["blocked_clients"]:
            await asyncio.sleep(0.01)


async def test_a_stream_is_added_and_removed_while_the_hub_waits_for_others(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", writer: StreamWriter
) -> None:
    async with running_hub(redis_server.url) as hub, hub.subscribe({"a": "0-0", "early": "0-0"}) as first:
        await wait_blocked(redis_client)
        write(writer, "b", 1, 3)
        async with hub.subscribe({"b": "1-1"}) as second:
            assert await take_until(second, 3) == [2, 3]
            assert len(hub) == 3
        assert len(hub) == 2
        await wait_blocked(redis_client)
        write(writer, "b", 4, 5)
        async with hub.subscribe({"b": "1-4"}) as again:
            assert await take_until(again, 5) == [5]
            write(writer, "a", 1, 2, end=True)
            assert await take_until(first, 2, end=True) == [1, 2]
            assert first.request_ids == ["early"]


async def test_each_subscriber_gets_its_whole_stream(redis_server: EmbeddedServer, writer: StreamWriter) -> None:
    names = [f"r{number}" for number in range(100)]

    async def follow(hub: StreamHub, name: str) -> list[int]:
        async with hub.subscribe({name: "0-0"}) as subscription:
            return await take_until(subscription, 20, end=True)

    async with running_hub(redis_server.url) as hub:
        following = [asyncio.create_task(follow(hub, name)) for name in names]
        for name in names:
            write(writer, name, 1, 10)
            await asyncio.sleep(0)
        for name in names:
            write(writer, name, 11, 20, end=True)
            await asyncio.sleep(0)
        assert await asyncio.gather(*following) == [list(range(1, 21))] * 100
        assert len(hub) == 0


async def test_subscribers_that_come_at_once_share_the_hubs_connections(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", writer: StreamWriter
) -> None:
    names = [f"r{number}" for number in range(300)]
    before = redis_client.info("stats")["total_connections_received"]
    async with running_hub(redis_server.url) as hub, AsyncExitStack() as opened:
        subscribing = [opened.enter_async_context(hub.subscribe({name: "0-0"})) for name in names]
        subscriptions = await asyncio.gather(*subscribing)
        for name in names:
            write(writer, name, 1, 2, end=True)
        for subscription in subscriptions:
            assert await take_until(subscription, 2, end=True) == [1, 2]
    assert redis_client.info("stats")["total_connections_received"] - before <= 5


async def test_one_stream_has_several_subscribers_up_to_a_limit(
    redis_server: EmbeddedServer, writer: StreamWriter
) -> None:
    write(writer, "r", 1, 5)
    async with running_hub(redis_server.url) as hub, AsyncExitStack() as opened:
        subscriptions = [await opened.enter_async_context(hub.subscribe({"r": "0-0"})) for _ in range(MAX_SUBSCRIBERS)]
        with pytest.raises(TooManySubscribersError):
            await opened.enter_async_context(hub.subscribe({"r": "0-0"}))
        write(writer, "r", 6, 8, end=True)
        for subscription in subscriptions:
            assert await take_until(subscription, 8, end=True) == list(range(1, 9))


async def test_a_slow_subscriber_loses_nothing_and_delays_no_other(
    redis_server: EmbeddedServer, writer: StreamWriter
) -> None:
    write(writer, "slow", 1, 1500)
    async with (
        running_hub(redis_server.url) as hub,
        hub.subscribe({"slow": "0-0"}) as slow,
        hub.subscribe({"quick": "0-0"}) as quick,
    ):
        write(writer, "quick", 1, 3)
        assert await take_until(quick, 3) == [1, 2, 3]
        write(writer, "slow", 1501, 3000, end=True)
        write(writer, "quick", 4, 6, end=True)
        assert await take_until(quick, 6, end=True) == [4, 5, 6]
        assert len(slow._events) == 512
        assert await take_until(slow, 3000, end=True) == list(range(1, 3001))


async def test_a_slow_subscriber_gets_nothing_twice_after_the_server_has_lost_entries(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", writer: StreamWriter
) -> None:
    write(writer, "r", 1, 1000)
    async with running_hub(redis_server.url) as hub, hub.subscribe({"r": "0-0"}) as subscription:
        async with asyncio.timeout(TIMEOUT):
            while not subscription.is_paused:
                await asyncio.sleep(0.01)
        redis_client.delete(stream_key("r"))
        writer.claim("r", "other", grant=Grant(2, "owner"))
        chunks = [
            StreamWrite.chunk("r", 2, n, index=0, token_ids=[n - 2, n - 1, n], text="ttt") for n in range(3, 1201, 3)
        ]
        writer.publish([*chunks, StreamWrite.end("r", 2, 1200, finish_reason="stop")])
        token_ids: list[int] = []
        while subscription.request_ids:
            events = await subscription.take(TIMEOUT)
            assert events
            token_ids += [token for _, event in events if isinstance(event, ChunkEvent) for token in event.token_ids]
        assert token_ids == list(range(1, 1201))


async def test_only_a_silent_stream_times_out_not_a_slow_reader(
    redis_server: EmbeddedServer, writer: StreamWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Mock(monotonic=Mock(return_value=0.0))
    for module in (following, hub_module):
        monkeypatch.setattr(module, "time", clock)
    write(writer, "r", 1, 600)
    ids: list[int] = []

    async def read(hub: StreamHub) -> None:
        async for _, event in following.follow(hub, {"r": "0-0"}, timeout=TIMEOUT):
            ids.append(event.offset if isinstance(event, ChunkEvent) else 0)
            if ids[-1] in (600, 601):
                write(writer, "r", ids[-1] + 1, ids[-1] + 1)
                while not hub._subscriptions["r"]._events:
                    await asyncio.sleep(0.01)
            if ids[-1] % 100 == 0 or ids[-1] == 602:
                clock.monotonic.return_value += TIMEOUT

    async with running_hub(redis_server.url) as hub:
        with pytest.raises(ResultTimeoutError):
            await read(hub)
    assert ids == list(range(603))


async def test_an_expired_stream_is_reported_and_the_others_continue(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", writer: StreamWriter
) -> None:
    write(writer, "gone", 1, 2, end=True)
    redis_client.delete(stream_key("gone"))
    async with (
        running_hub(redis_server.url) as hub,
        hub.subscribe({"gone": "0-0"}) as gone,
        hub.subscribe({"late": "0-0"}) as late,
    ):
        ((name, event),) = await gone.take(TIMEOUT)
        assert (name, type(event)) == ("gone", StreamExpiredError)
        assert gone.request_ids == []
        write(writer, "late", 1, 2, end=True)
        assert await take_until(late, 2, end=True) == [1, 2]


async def test_a_malformed_entry_fails_only_its_own_subscriber(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", writer: StreamWriter
) -> None:
    redis_client.xadd(stream_key("bad"), {"type": "new", "data": b""}, id="1-1")
    async with (
        running_hub(redis_server.url) as hub,
        hub.subscribe({"good": "0-0"}) as good,
        hub.subscribe({"bad": "0-0"}) as bad,
    ):
        with pytest.raises(MalformedEntryError):
            await bad.take(TIMEOUT)
        write(writer, "good", 1, 2, end=True)
        assert await take_until(good, 2, end=True) == [1, 2]


@pytest.mark.parametrize("max_outage", [TIMEOUT, 0.0])
async def test_subscribers_get_an_error_only_after_the_longest_allowed_outage(max_outage: float) -> None:
    with make_server(appendonly=True) as server, redis.Redis.from_url(server.url, protocol=2) as client:
        write(StreamWriter(client, 60), "r", 1, 3)
        async with running_hub(server.url, max_outage=max_outage) as hub:
            async with hub.subscribe({"r": "0-0"}) as subscription:
                assert await take_until(subscription, 3) == [1, 2, 3]
                await wait_blocked(client)
                taking = asyncio.create_task(subscription.take(TIMEOUT))
                await asyncio.to_thread(server.kill)
                if max_outage == 0:
                    with pytest.raises(redis.ConnectionError):
                        await taking
                await asyncio.to_thread(server.start)
                write(StreamWriter(client, 60), "r", 4, 5, end=True)
                if max_outage:
                    events = await taking
                    assert [event.offset for _, event in events if isinstance(event, ChunkEvent)] == [4, 5]
            async with hub.subscribe({"r": "1-2"}) as again:
                assert await take_until(again, 5, end=True) == [3, 4, 5]
