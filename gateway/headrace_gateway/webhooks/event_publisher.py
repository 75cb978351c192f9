"""`Webhooks`: the interface of webhooks to the rest of the gateway."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from headrace_gateway.background_task import keep_running, running
from headrace_gateway.watched_file import WatchedFile
from headrace_gateway.webhooks.endpoint_file import Endpoint
from headrace_gateway.webhooks.event import EVENT_TYPES, Event
from headrace_gateway.webhooks.network import Resolver
from headrace_gateway.webhooks.outbox import Outbox
from headrace_gateway.webhooks.post import Poster
from headrace_gateway.webhooks.sender import Sender
from headrace_monitoring.gateway_metrics import GatewayMetrics

if TYPE_CHECKING:
    import redis.asyncio

EndpointFile = WatchedFile[Mapping[str, Endpoint]]


class Webhooks:
    """Webhooks of one replica.

    Args:
        client: from the broker's `connections.connect_async`.
        endpoints: None: no webhooks are sent.
    """

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        endpoints: EndpointFile | None,
        metrics: GatewayMetrics,
    ) -> None:
        self._endpoints: Final = endpoints
        self._outbox: Final = Outbox(client)
        self._metrics: Final = metrics
        self._sender: Sender | None = None

    async def publish(self, event_type: str, object_id: str, *, key: str, tenant: str | None, at: int) -> None:
        """Queue an event for its subscribed endpoints. Redis has the event when this returns. Repeats have no effect.

        Publish a change before you record it as done. After a failure, repeat both, so that neither is lost.

        Args:
            event_type: one of EVENT_TYPES.
            object_id: such as `resp_...`.
            key: name of the API key that owns the object.
            at: unix seconds of the change.

        Raises:
            redis.RedisError: the event may or may not be in Redis; publish it again.
        """
        assert event_type in EVENT_TYPES, event_type
        if self._endpoints is None:
            return
        event = Event(event_type, object_id, at, key, tenant)
        for endpoint in self._endpoints.content().values():
            if endpoint.wants(event) and await self._outbox.put(event, endpoint.name) and self._sender is not None:
                self._sender.wake(endpoint.name)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Deliver events while the block runs: a background task of each replica."""
        if self._endpoints is None:
            yield
            return
        resolver = Resolver()
        sender = Sender(self._outbox, self._endpoints.content, Poster(resolver), self._metrics)
        self._sender = sender
        try:
            async with running(keep_running(sender.run)):
                yield
        finally:
            await sender.finish()
            resolver.close()
