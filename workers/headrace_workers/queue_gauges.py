"""`QueueGauges`: how long the queue is, whose messages it holds and how old the oldest is, polled by the worker."""

import logging
import time

import redis

from headrace_broker.connections import REDIS_ERRORS
from headrace_broker.queue_levels import QueueLevelReader, read_tenants
from headrace_monitoring.metrics import Metrics

logger = logging.getLogger(__name__)


class QueueGauges:
    interval_seconds = 5.0

    def __init__(self, client: "redis.Redis", queue: str, metrics: Metrics) -> None:
        self._client = client
        self._reader = QueueLevelReader(client)
        self._queue = queue
        self._metrics = metrics

    def poll(self) -> None:
        """Read the levels of this worker's queue; Redis away only marks it down."""
        started = time.perf_counter()
        try:
            levels = self._reader.read([self._queue])[self._queue]
            tenants = read_tenants(self._client, self._queue)
        except REDIS_ERRORS as error:
            self._metrics.redis_error("depth")
            self._metrics.redis_up(False)
            logger.warning("the queue's length could not be read: %s", error)
            return
        self._metrics.redis_command("depth", time.perf_counter() - started)
        self._metrics.redis_up(True)
        self._metrics.queue_depth(levels.num_ready, levels.leased, levels.num_dead, levels.oldest_age_seconds)
        self._metrics.tenants_queued(tenants)
