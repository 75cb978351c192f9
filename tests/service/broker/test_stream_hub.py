"""Many subscribers behind one connection: what befalls one of them is not for the others."""

import asyncio

import pytest
import redis

from headrace_broker.connections import connect_async
from headrace_broker.embedded import EmbeddedServer
from headrace_broker.errors import MalformedEntryError
from headrace_broker.events import EndEvent, pack
from headrace_broker.keys import stream_key
from headrace_broker.results import Usage
from headrace_broker.stream_hub import StreamHub, Subscription
from headrace_broker.streams import StreamWrite, StreamWriter

pytestmark = pytest.mark.redis


async def last_event(subscription: Subscription) -> object:
    async with asyncio.timeout(30):
        while True:
            for _, event in await subscription.take(None):
                if isinstance(event, EndEvent):
                    return event


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "chunk", "data": b"\xc1"},
        {"type": "chunk", "data": pack({"index": 0})},
        {"type": "end", "data": pack({"finish_reason": "stop", "usage": 7, "error": "none"})},
        {"other": "x"},
    ],
)
async def test_an_entry_that_nobody_can_read_fails_its_own_stream_only(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", fields: dict[str, bytes | str]
) -> None:
    writer = StreamWriter(redis_client, 60)
    for request_id in ("good", "bad"):
        writer.claim(request_id, "w")
    async with connect_async(redis_server.url) as connection:
        hub = StreamHub(connection)
        async with hub.subscribe({"good": "0-0"}) as good, hub.subscribe({"bad": "1-0"}) as bad:
            redis_client.xadd(stream_key("bad"), fields, id="1-1")
            with pytest.raises(MalformedEntryError):
                await bad.take(30)
            writer.publish([StreamWrite.end("good", 1, 0, finish_reason="stop", usage=Usage(1, 0, 0))])
            assert isinstance(await last_event(good), EndEvent)
        await hub.aclose()
