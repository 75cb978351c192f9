"""`RedisWatch` ends with its block, whatever redis-py makes of the cancellation."""

import asyncio
from typing import Any, cast

import redis.asyncio

from headrace_gateway.redis.watch import RedisWatch
from headrace_monitoring.gateway_metrics import GatewayMetrics


class SwallowingClient:
    """A server whose second reply arrives together with a cancellation, which is lost."""

    def __init__(self) -> None:
        self.num_replies = 0
        self.waits = asyncio.Event()
        self.has_swallowed = False

    async def info(self, *_sections: str) -> dict[str, int]:
        return {"used_memory": 1}

    async def exists(self, _key: str) -> int:
        self.num_replies += 1
        if self.num_replies == 2:
            self.waits.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.has_swallowed = True
        return 0


async def test_the_watch_ends_although_a_cancellation_is_lost() -> None:
    client = SwallowingClient()
    async with RedisWatch(GatewayMetrics(version="0")).watching(cast("redis.asyncio.Redis", cast("Any", client))):
        await client.waits.wait()
    assert client.has_swallowed
