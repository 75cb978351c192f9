"""`Sender`: the background task that delivers webhooks. Every replica runs one, and they share the deliveries.

If a replica dies between sending and recording, the delivery is sent again with the same webhook-id: at least once.
"""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import structlog

from headrace_broker.server.connections import REDIS_ERRORS
from headrace_gateway.background_task import end_tasks, poll
from headrace_gateway.redis.claims import Claim
from headrace_gateway.webhooks.endpoint_file import Endpoint
from headrace_gateway.webhooks.outbox import LIFE_SECONDS, Attempt, Delivery, Outbox, retry_delay
from headrace_gateway.webhooks.secret import signed_headers
from headrace_monitoring.gateway_metrics import GatewayMetrics
from headrace_monitoring.logging import frames

_POLL_SECONDS: Final = 1.0
_CONCURRENCY: Final = 8
"""Concurrent attempts of one replica at one endpoint."""
_GRACE_SECONDS: Final = 5.0
"""Seconds for open attempts to end at shutdown. Other replicas send the rest again when the claims expire."""
_UNWANTED: Final = Attempt(failure="the endpoint does not subscribe to it in this replica's webhook file")
"""Counts as a failure, since another replica may have a newer file."""

Post = Callable[[Endpoint, Mapping[str, str], bytes], Awaitable[Attempt]]

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)


class Sender:
    """Delivers the events that are due.

    Args:
        endpoints: returns the newest version of the webhook file.
        post: makes one attempt.
        jitter: returns numbers from 0 to 1.
        poll_seconds: time between two polls.
    """

    def __init__(
        self,
        outbox: Outbox,
        endpoints: Callable[[], Mapping[str, Endpoint]],
        post: Post,
        metrics: GatewayMetrics,
        *,
        jitter: Callable[[], float] = random.random,
        poll_seconds: float = _POLL_SECONDS,
    ) -> None:
        self._outbox: Final = outbox
        self._endpoints: Final = endpoints
        self._post: Final = post
        self._metrics: Final = metrics
        self._jitter: Final = jitter
        self._poll_seconds: Final = poll_seconds
        self._workers: Final[dict[str, set[asyncio.Task[None]]]] = defaultdict(set)
        self._is_running = False

    async def run(self) -> None:
        """Deliver until cancelled. Then call `finish`."""
        self._is_running = True
        try:
            await poll(self._poll, "webhooks", seconds=self._poll_seconds)
        finally:
            self._is_running = False

    async def finish(self) -> None:
        """Wait for open attempts to end, and cancel those that take too long."""
        workers = [worker for workers in self._workers.values() for worker in workers]
        if workers:
            await asyncio.wait(workers, timeout=_GRACE_SECONDS)
        await end_tasks(*workers)

    def wake(self, name: str) -> None:
        """Send the due events of this endpoint now, without waiting for the next poll."""
        if self._is_running and len(self._workers[name]) < _CONCURRENCY:
            worker = asyncio.create_task(self._work(name))
            self._workers[name].add(worker)
            worker.add_done_callback(self._workers[name].discard)

    async def _poll(self) -> bool:
        """Start the deliveries that are due, and update the metrics."""
        waiting = await self._outbox.waiting(self._endpoints())
        now = time.time()
        self._metrics.webhooks_waiting(
            undelivered=sum(count for count, _ in waiting.values()),
            oldest_seconds=max((max(0.0, now - oldest) for _, oldest in waiting.values()), default=0.0),
        )
        for name, (count, _) in waiting.items():
            if count:
                self.wake(name)
        return False

    async def _work(self, name: str) -> None:
        """Deliver one event after the other until none is due."""
        claims = self._outbox.claims(name)
        try:
            while self._is_running and (endpoint := self._endpoints().get(name)) is not None:
                taken = await claims.take(1)
                if not taken:
                    return
                self.wake(name)  # meanwhile another task takes the next event
                await self._deliver(endpoint, taken[0])
        except REDIS_ERRORS as error:
            logger.warning("webhook not recorded, will be resent", endpoint=name, reason=type(error).__name__)
        except Exception as error:  # noqa: BLE001  # its claim expires, and the other deliveries continue
            logger.error("webhook failed", endpoint=name, exception=frames(error))

    async def _deliver(self, endpoint: Endpoint, claim: Claim) -> None:
        name, event_id = endpoint.name, claim.item
        delivery = await self._outbox.delivery(name, event_id)
        if delivery is None or delivery.is_done:
            if await self._outbox.finish(name, claim, delivery) and delivery is None:
                self._metrics.webhook_attempted("given_up")
                logger.error("webhook expired", endpoint=name, webhook_event=event_id, days=LIFE_SECONDS // 86400)
            return
        attempt = await self._attempt(endpoint, delivery)
        log = logger.bind(
            endpoint=name,
            webhook_event=event_id,
            type=delivery.event.type,
            attempt=delivery.failed + 1,
            status=attempt.status,
        )  # without the URL, whose query may contain a secret
        if attempt.is_delivered:
            await self._outbox.finish(name, claim, delivery)
            self._metrics.webhook_attempted("delivered")
            log.info("webhook delivered")
        elif (after := retry_delay(attempt, failed_before=delivery.failed, jitter=self._jitter())) is None:
            await self._outbox.finish(name, claim, delivery)
            self._metrics.webhook_attempted("given_up")
            log.error("webhook given up", reason=attempt.failure)
        else:
            await self._outbox.retry(name, claim, delivery, after=after)
            self._metrics.webhook_attempted("failed")
            log.warning("webhook not delivered", retry_in_seconds=round(after), reason=attempt.failure)

    async def _attempt(self, endpoint: Endpoint, delivery: Delivery) -> Attempt:
        if not endpoint.wants(delivery.event):
            return _UNWANTED
        body = delivery.event.body()
        headers = signed_headers(delivery.event.id, body, endpoint.secrets, at=int(time.time()))
        return await self._post(endpoint, headers, body)
