"""`QueueGauges`: metrics of the worker's queues: length, tenants, age of the oldest message, blocked or not."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import redis

from headrace_broker.queue.levels import QueueLevelReader, QueueLevels, read_tenants
from headrace_broker.queue.worker_leases import WorkerLeases
from headrace_broker.server.connections import REDIS_ERRORS, address_of
from headrace_monitoring.health import WorkerHealth
from headrace_monitoring.metrics import Metrics

logger = logging.getLogger(__name__)


POLL_SECONDS: Final = 5.0
_IDLE_SECONDS: Final = 15.0
"""How often a worker without messages reads queues that had none. Any other worker reads its queues by each poll."""


class QueueGauges:
    """Reads the queues of one worker. `client_of` returns the client of a queue's server.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        client_of: "Callable[[str], redis.Redis]",
        queues: Sequence[str],
        metrics: Metrics,
        health: WorkerHealth,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client_of = client_of
        self._reader = QueueLevelReader(client_of)
        self._queues = queues
        self._metrics = metrics
        self._health = health
        self._clock = clock
        self._rests_until = -math.inf
        """`poll` reads nothing before this time while the worker holds no message."""
        self._leases: WorkerLeases | None = None
        """They know which servers are left alone now. None before the first connection."""
        self._refusal: str | None = None
        """The reason why Redis refused to deliver messages or to take output since the last poll; None: no refusal."""

    def attach(self, leases: WorkerLeases) -> None:
        """Use the leases of a new connection. The queues may be on another server now."""
        self._leases = leases
        self._rests_until = -math.inf

    def refused(self, reason: str) -> None:
        """Report that Redis, or a script, refused to serve the queue. The second poll after this clears the report."""
        self._refusal = reason
        self._report(reason)

    def _report(self, problem: str | None) -> None:
        self._metrics.queue_blocked(problem is not None)
        self._health.queue_blocked(problem)

    def poll(self) -> None:
        """Read the message counts and ages of this worker's queues. Set the metrics, or report which servers are down.

        With several servers, the metrics count the queues on those that answer. Call it once in POLL_SECONDS. Two of
        three calls do nothing while the worker and its queues have no message.
        """
        if self._clock() < self._rests_until and self._refusal is None and not self._leases:
            return
        self._rests_until = -math.inf
        started = time.perf_counter()
        by_queue: dict[str, QueueLevels] = {}
        tenants = Counter[str]()
        problems: list[str] = []
        for queue in self._queues:
            try:
                away = self._leases.away(queue) if self._leases is not None else None
                if away is not None:
                    problems.append(away)
                    continue
                by_queue |= self._reader.read([queue])
                if by_queue[queue].problem is None:
                    tenants.update(read_tenants(self._client_of(queue), queue))
            except REDIS_ERRORS as error:
                problems.append(f"{queue} on {address_of(self._client_of(queue))}: {error}")
                if self._leases is not None:
                    self._leases.failed(queue, error)
                self._metrics.redis_error("depth")
                logger.warning("queue levels not read: %s", problems[-1])
        self._metrics.redis_up(bool(by_queue))
        levels = by_queue.values()
        problems += [level.problem for level in levels if level.problem is not None]
        self._report(problems[0] if problems else self._refusal)
        if not by_queue:
            return
        self._metrics.redis_command("depth", time.perf_counter() - started)
        if not problems and self._refusal is None and not any(level.num_ready or level.leased for level in levels):
            self._rests_until = self._clock() + _IDLE_SECONDS - POLL_SECONDS / 2  # the timer is not exact
        self._refusal = None
        ages = [level.oldest_age_seconds for level in levels if level.oldest_age_seconds is not None]
        self._metrics.queue_depth(
            sum(level.num_ready for level in levels),
            sum(level.leased for level in levels),
            sum(level.num_dead for level in levels),
            max(ages, default=None),
        )
        self._metrics.tenants_queued(tenants)
