"""`Sender`: the background task that delivers webhooks. Every replica runs one, and they share the deliveries.

If a replica dies between sending and recording, the delivery is sent again with the same webhook-id: at least once.
"""

import asyncio
import logging
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from headrace_broker.connections import REDIS_ERRORS
from headrace_gateway.claims import Claim
from headrace_gateway.event_stream import end_tasks
from headrace_gateway.webhooks.endpoint_file import Endpoint
from headrace_gateway.webhooks.outbox import Delivery, Outbox
from headrace_gateway.webhooks.retries import LIFE_SECONDS, Attempt, Decision, decide
from headrace_gateway.webhooks.secret import signed_headers
from headrace_monitoring.gateway_metrics import GatewayMetrics
from headrace_monitoring.logging import frames

_LOOK_SECONDS: Final = 1.0
_CONCURRENCY: Final = 8
"""Concurrent attempts of one replica at one endpoint."""
_GRACE_SECONDS: Final = 5.0
"""Time limit of open attempts at shutdown. Other replicas send the rest again when the claims expire."""

_FILE_SECONDS: Final = 600.0
"""After this long every replica has loaded a new version of the file."""
_OTHERS_SECONDS: Final = 30.0

Post = Callable[[Endpoint, Mapping[str, str], bytes], Awaitable[Attempt]]

logger = logging.getLogger(__name__)


class Sender:
    """Delivers the events that are due.

    Args:
        endpoints: returns the newest version of the webhook file.
        post: makes one attempt.
        draw: returns numbers from 0 to 1 for the jitter.
        poll_seconds: time between two polls.
    """

    def __init__(
        self,
        outbox: Outbox,
        endpoints: Callable[[], Mapping[str, Endpoint]],
        post: Post,
        metrics: GatewayMetrics,
        *,
        draw: Callable[[], float] = random.random,
        poll_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self._outbox: Final = outbox
        self._endpoints: Final = endpoints
        self._post: Final = post
        self._metrics: Final = metrics
        self._draw: Final = draw
        self._poll_seconds: Final = poll_seconds
        self._open: set[str] = set()
        """Names of the endpoints that may be sent to."""
        self._workers: Final[dict[str, set[asyncio.Task[None]]]] = defaultdict(set)
        self._is_running = False

    async def run(self) -> None:
        """Deliver until cancelled. Then call `finish`."""
        self._is_running, is_redis_up = True, True
        task = asyncio.current_task()
        assert task is not None
        try:
            # asyncio.wait_for of Python 3.11, in redis-py, can lose a cancellation
            while not task.cancelling():
                try:
                    await self._poll()
                except REDIS_ERRORS as error:
                    if is_redis_up:
                        logger.warning("webhooks waiting for Redis: %s", type(error).__name__)
                    is_redis_up = False
                else:
                    is_redis_up = True
                if not task.cancelling():
                    await asyncio.sleep(self._poll_seconds)
        finally:
            self._is_running = False

    async def finish(self) -> None:
        """Wait for open attempts to end, and cancel those that take too long."""
        workers = [worker for workers in self._workers.values() for worker in workers]
        if workers:
            await asyncio.wait(workers, timeout=_GRACE_SECONDS)
        await end_tasks(*workers)

    def wake(self, name: str) -> None:
        """Send what is due to this endpoint now, without waiting for the next poll."""
        if self._is_running and name in self._open and len(self._workers[name]) < _CONCURRENCY:
            worker = asyncio.create_task(self._work(name))
            self._workers[name].add(worker)
            worker.add_done_callback(self._workers[name].discard)

    async def _poll(self) -> None:
        """Start what is due, and update the metrics."""
        endpoints = list(self._endpoints().values())
        levels = dict(zip((endpoint.name for endpoint in endpoints), await self._outbox.levels(endpoints), strict=True))
        self._open = {name for name, level in levels.items() if not level.is_paused and not level.is_disabled}
        enabled = [level for level in levels.values() if not level.is_disabled]
        self._metrics.webhooks_waiting(
            undelivered=sum(level.undelivered for level in enabled),
            oldest_seconds=max((level.oldest_seconds for level in enabled), default=0),
            disabled=len(levels) - len(enabled),
        )
        for name, level in levels.items():
            for _ in range(min(level.due, _CONCURRENCY)):
                self.wake(name)

    async def _work(self, name: str) -> None:
        """Deliver one event after the other until none is due."""
        claims = self._outbox.claims(name)
        try:
            while name in self._open and self._is_running:
                endpoint = self._endpoints().get(name)
                if endpoint is None:
                    return
                for claim in await claims.take(1):
                    await self._deliver(endpoint, claim)
                    break
                else:
                    return
        except REDIS_ERRORS as error:
            logger.warning("webhook not recorded, will be resent: endpoint=%s (%s)", name, type(error).__name__)
        except Exception as error:  # noqa: BLE001  # its claim expires, and the other deliveries continue
            logger.error("webhook failed: endpoint=%s\n%s", name, frames(error))

    async def _deliver(self, endpoint: Endpoint, claim: Claim) -> None:
        delivery = await self._outbox.delivery(claim.item, endpoint.name)
        if delivery is None:
            await self._end(endpoint, claim)
            return
        if not endpoint.wants(delivery.event):
            await self._decline(endpoint, claim, delivery)
            return
        body = delivery.event.body()
        headers = signed_headers(claim.item, body, endpoint.secrets, at=int(time.time()))
        attempt = await self._post(endpoint, headers, body)
        decision = decide(attempt, failed_before=delivery.failed, slowed_before=delivery.slowed, jitter=self._draw())
        if decision.pause or decision.outcome == "gone":
            self._open.discard(endpoint.name)
        await self._outbox.note(claim, endpoint, decision, failed=delivery.failed + 1)
        self._metrics.webhook_attempted(decision.outcome)
        _log(endpoint, delivery, attempt, decision)

    async def _end(self, endpoint: Endpoint, claim: Claim) -> None:
        """Delete an event that is done, or that expired before it was."""
        is_kept = await self._outbox.is_kept(claim.item)
        if await self._outbox.drop(claim, endpoint.name) and not is_kept:
            self._metrics.webhook_attempted("given_up")
            days = LIFE_SECONDS // 86400
            logger.error("webhook expired: endpoint=%s event=%s (after %d days)", endpoint.name, claim.item, days)

    async def _decline(self, endpoint: Endpoint, claim: Claim, delivery: Delivery) -> None:
        """Delete an event that no endpoint wants. Leave a new one to other replicas first: their file may be newer."""
        what = f"endpoint={endpoint.name} event={delivery.event.id} type={delivery.event.type}"
        if time.time() - delivery.event.created_at < _FILE_SECONDS:
            await self._outbox.claims(endpoint.name).put_back(claim, after=_OTHERS_SECONDS)
            logger.info("webhook left to other replicas, not in this replica's file: %s", what)
        elif await self._outbox.drop(claim, endpoint.name):
            logger.warning("webhook dropped, not in the webhook file: %s", what)


def _log(endpoint: Endpoint, delivery: Delivery, attempt: Attempt, decision: Decision) -> None:
    """Log one line per attempt, without the URL, whose query may contain a secret."""
    what = (
        f"endpoint={endpoint.name} event={delivery.event.id} type={delivery.event.type} attempt={delivery.failed + 1}"
    )
    why = attempt.failure if attempt.status is None else f"status {attempt.status}"
    if decision.outcome == "delivered":
        logger.info("webhook delivered: %s status=%s", what, attempt.status)
    elif decision.outcome == "failed":
        logger.warning("webhook not delivered, retry in %.0f s: %s (%s)", decision.after, what, why)
    elif decision.outcome == "gone":
        logger.error("webhook endpoint disabled by its status 410, see `headrace webhook-enable`: %s", what)
    else:
        logger.error("webhook given up: %s (%s)", what, why)
