"""`ListenerWatch`: finds abandoned requests, whose subscriber heartbeats have stopped for `abandon_after` seconds."""

import logging
import time
from collections.abc import Callable, Collection, Iterable

from headrace_broker.connections import REDIS_ERRORS
from headrace_broker.listeners import Listeners
from headrace_workers.job import Job

logger = logging.getLogger(__name__)


class ListenerWatch:
    """Asks Redis for the time since each request's last subscriber heartbeat.

    While Redis is away, no subscriber can send a heartbeat. So a request counts as abandoned only after Redis has been
    available for the request's whole `abandon_after`.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, listeners: Listeners, clock: Callable[[], float] = time.monotonic) -> None:
        self._listeners = listeners
        self._clock = clock
        self._watched: set[str] = set()
        self._available_since = clock()

    def redis_was_away(self) -> None:
        """Begin the wait for heartbeats anew, because Redis is or was away."""
        self._available_since = self._clock()

    def is_abandoned(self, job: Job) -> bool:
        """Whether a request that is about to start has been abandoned."""
        return bool(job.abandon_after is not None and self._ask([job], over=()))

    def abandoned(self, jobs: Iterable[Job]) -> list[Job]:
        """List the abandoned jobs. Pass all jobs of the worker; Redis is not asked if none has `abandon_after`.

        A job of the last call that is missing now has ended or runs on another worker. It is no longer watched.
        """
        watched = [job for job in jobs if job.abandon_after is not None]
        over = self._watched - {job.request_id for job in watched}
        return self._ask(watched, over) if watched or over else []

    def _ask(self, jobs: Collection[Job], over: Collection[str]) -> list[Job]:
        limits = {job.request_id: job.abandon_after for job in jobs if job.abandon_after is not None}
        try:
            silence = self._listeners.silence(limits, forget=over)
        except REDIS_ERRORS as error:
            self.redis_was_away()
            logger.warning("subscriber heartbeats could not be read: %s", error)
            return []
        self._watched = (self._watched | limits.keys()).difference(over)
        available = self._clock() - self._available_since
        return [job for job in jobs if min(silence[job.request_id], available) >= limits[job.request_id]]
