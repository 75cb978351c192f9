"""`QueueGauges`: how long the queue is and how old its oldest message, polled from Redis by the worker."""

import json
import logging
import time
from typing import Any

import redis

from headrace_broker.connections import REDIS_ERRORS
from headrace_broker.keys import DEAD_LETTERS_KEY, LEASES_KEY, queue_lists
from headrace_monitoring.metrics import Metrics

logger = logging.getLogger(__name__)


class QueueGauges:
    interval_seconds = 5.0

    def __init__(self, client: "redis.Redis", queue: str, metrics: Metrics) -> None:
        self._client = client
        self._lists = queue_lists(queue)
        self._metrics = metrics

    def poll(self) -> None:
        """Read the queue's length and the age of each list's next message; Redis away only marks it down."""
        started = time.perf_counter()
        try:
            with self._client.pipeline(transaction=False) as pipe:
                for name in self._lists:
                    pipe.llen(name)
                    pipe.lindex(name, -1)
                pipe.zcard(LEASES_KEY)
                pipe.llen(DEAD_LETTERS_KEY)
                *lists, leased, dead = pipe.execute()
        except REDIS_ERRORS as error:
            self._metrics.redis_error("depth")
            self._metrics.redis_up(False)
            logger.warning("the queue's length could not be read: %s", error)
            return
        self._metrics.redis_command("depth", time.perf_counter() - started)
        self._metrics.redis_up(True)
        ages = [age for body in lists[1::2] if (age := _age(body)) is not None]
        self._metrics.queue_depth(
            ready=sum(lists[0::2]), unacked=leased, scheduled=0, dead=dead, oldest_age_seconds=max(ages, default=None)
        )


def _age(body: Any) -> float | None:
    """Seconds since a message was enqueued, where it says so."""
    try:
        return time.time() - float(json.loads(body)["headers"]["enqueued_at"])
    except (TypeError, ValueError, KeyError, OverflowError, RecursionError):
        return None
