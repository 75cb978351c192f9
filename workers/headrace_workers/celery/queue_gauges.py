"""`QueueGauges`: metrics of the worker's queues: length, tenants, age of the oldest message, blocked or not."""

import logging
import time
from collections import Counter
from collections.abc import Sequence

import redis

from headrace_broker.queue.levels import QueueLevelReader, read_tenants
from headrace_broker.server.connections import REDIS_ERRORS
from headrace_monitoring.health import WorkerHealth
from headrace_monitoring.metrics import Metrics

logger = logging.getLogger(__name__)


class QueueGauges:
    interval_seconds = 5.0

    def __init__(self, client: "redis.Redis", queues: Sequence[str], metrics: Metrics, health: WorkerHealth) -> None:
        self._client = client
        self._reader = QueueLevelReader(client)
        self._queues = queues
        self._metrics = metrics
        self._health = health
        self._refusal: str | None = None
        """The reason why Redis refused to deliver messages or to take output since the last poll; None: no refusal."""

    def refused(self, reason: str) -> None:
        """Report that Redis, or a script, refused to serve the queue. The second poll after this clears the report."""
        self._refusal = reason
        self._report(reason)

    def _report(self, problem: str | None) -> None:
        self._metrics.queue_blocked(problem is not None)
        self._health.queue_blocked(problem)

    def poll(self) -> None:
        """Read the message counts and ages of this worker's queues. Set the metrics, or report that Redis is down."""
        started = time.perf_counter()
        try:
            by_queue = self._reader.read(self._queues)
            tenants = Counter[str]()
            for queue, level in by_queue.items():
                if level.problem is None:
                    tenants.update(read_tenants(self._client, queue))
        except REDIS_ERRORS as error:
            self._metrics.redis_error("depth")
            self._metrics.redis_up(False)
            logger.warning("queue levels not read: %s", error)
            self._report(str(error))
            return
        self._metrics.redis_command("depth", time.perf_counter() - started)
        self._metrics.redis_up(True)
        levels = by_queue.values()
        self._report(next((level.problem for level in levels if level.problem is not None), self._refusal))
        self._refusal = None
        ages = [level.oldest_age_seconds for level in levels if level.oldest_age_seconds is not None]
        self._metrics.queue_depth(
            sum(level.num_ready for level in levels),
            sum(level.leased for level in levels),
            sum(level.num_dead for level in levels),
            max(ages, default=None),
        )
        self._metrics.tenants_queued(tenants)
