"""Replicas that send webhooks, in the test's own process, on a real Redis."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import redis

from headrace_broker.server.connections import connect_async
from headrace_broker.server.embedded import EmbeddedServer
from headrace_gateway.background_task import end_tasks
from headrace_gateway.webhooks.endpoint_file import Endpoint
from headrace_gateway.webhooks.network import Resolver
from headrace_gateway.webhooks.outbox import Outbox
from headrace_gateway.webhooks.post import Poster
from headrace_gateway.webhooks.sender import Sender
from headrace_monitoring.gateway_metrics import GatewayMetrics
from service.gateway.webhooks.receiver import PATIENCE

KEY = b"k" * 32


def endpoint(name: str, url: str, **rest: Any) -> Endpoint:
    """An endpoint on loopback."""
    return Endpoint(name, url, rest.pop("secrets", (KEY,)), allow_private=rest.pop("allow_private", True), **rest)


class Replica:
    """A gateway's webhooks."""

    def __init__(self, outbox: Outbox, endpoints: dict[str, Endpoint], post: Any) -> None:
        self.endpoints = endpoints
        self.outbox = outbox
        self.metrics = GatewayMetrics()
        self.sender = Sender(outbox, lambda: self.endpoints, post, self.metrics, jitter=lambda: 0.0, poll_seconds=0.05)
        self._running: asyncio.Task[None] | None = None

    def start(self) -> "Replica":
        self._running = asyncio.create_task(self.sender.run())
        return self

    async def stop(self) -> None:
        if self._running is not None:
            await end_tasks(self._running)
            await self.sender.finish()

    def attempts(self, outcome: str) -> float:
        """Return the number of attempts with this outcome."""
        return self.value("headrace_gateway_webhook_deliveries_total", outcome=outcome)

    def value(self, metric: str, **labels: str) -> float:
        found = self.metrics.registry.get_sample_value(metric, labels)
        assert found is not None
        return found

    async def until(self, holds: Callable[[], bool | Awaitable[bool]]) -> None:
        """Wait until it holds."""
        async with asyncio.timeout(PATIENCE):
            while True:
                held = holds()
                if held if isinstance(held, bool) else await held:
                    return
                await asyncio.sleep(0.01)


MakeReplica = Callable[..., Awaitable[Replica]]


@pytest.fixture
async def replica(redis_server: EmbeddedServer) -> AsyncIterator[MakeReplica]:
    """Makes a replica with these endpoints. `resolve`, `tls` and `seconds` go to its Poster."""
    async with AsyncExitStack() as stack:

        async def make(*endpoints: Endpoint, post: Any = None, **options: Any) -> Replica:
            client = await stack.enter_async_context(connect_async(redis_server.url))
            resolver = Resolver()
            stack.callback(resolver.close)
            made = Replica(
                Outbox(client),
                {each.name: each for each in endpoints},
                post or Poster(options.pop("resolve", resolver), **options),
            )
            stack.push_async_callback(made.stop)
            return made

        yield make


@pytest.fixture
def let_pass(redis_client: "redis.Redis") -> Callable[[float], None]:
    """Let time pass for deliveries: date everything that many seconds back."""

    def let_pass(seconds: float) -> None:
        for key in redis_client.scan_iter("headrace:gw:work:webhook:*", _type="zset"):
            for item, due in redis_client.zrange(key, 0, -1, withscores=True):
                redis_client.zadd(key, {item: due - seconds * 1000}, xx=True)

    return let_pass
