"""`QueueGauges`: how long the queue is, whose messages it holds and how old the oldest is, polled by the worker."""

import logging
import time
from collections import Counter
from collections.abc import Sequence

import redis

from headrace_broker.connections import REDIS_ERRORS
from headrace_broker.queue_levels import QueueLevelReader, read_tenants
from headrace_monitoring.metrics import Metrics

logger = logging.getLogger(__name__)


class QueueGauges:
    interval_seconds = 5.0

    def __init__(self, client: "redis.Redis", queues: Sequence[str], metrics: Metrics) -> None:
        self._client = client
        self._reader = QueueLevelReader(client)
        self._queues = queues
        self._metrics = metrics

    def poll(self) -> None:
        """Read the levels of this worker's queues, which count together; Redis away only marks it down."""
        started = time.perf_counter()
        try:
            levels = self._reader.read(self._queues).values()
            tenants = Counter[str]()
            for queue in self._queues:
                tenants.update(read_tenants(self._client, queue))
        except REDIS_ERRORS as error:
            self._metrics.redis_error("depth")
            self._metrics.redis_up(False)
            logger.warning("the queue's length could not be read: %s", error)
            return
        self._metrics.redis_command("depth", time.perf_counter() - started)
        self._metrics.redis_up(True)
        ages = [level.oldest_age_seconds for level in levels if level.oldest_age_seconds is not None]
        self._metrics.queue_depth(
            sum(level.num_ready for level in levels),
            sum(level.leased for level in levels),
            sum(level.num_dead for level in levels),
            max(ages, default=None),
        )
        self._metrics.tenants_queued(tenants)
