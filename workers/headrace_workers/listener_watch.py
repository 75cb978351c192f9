"""`ListenerWatch`: finds the requests to which nobody listens any more, where they were sent with `abandon_after`."""

import logging
import time
from collections.abc import Callable, Collection, Iterable

from headrace_broker.connections import REDIS_ERRORS
from headrace_broker.listeners import Listeners
from headrace_workers.job import Job

logger = logging.getLogger(__name__)


class ListenerWatch:
    """Asks Redis when each request was listened to last.

    While Redis is away nobody can say that he listens. So nobody is judged until Redis has been there for as long as
    the request may do without a listener.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, listeners: Listeners, clock: Callable[[], float] = time.monotonic) -> None:
        self._listeners = listeners
        self._clock = clock
        self._watched: set[str] = set()
        self._sighted_since = clock()

    def lost_sight(self) -> None:
        """Redis was away, or is; this worker may have begun while it was."""
        self._sighted_since = self._clock()

    def is_abandoned(self, job: Job) -> bool:
        """Whether a request that comes from the queue is to be cancelled."""
        return bool(job.abandon_after is not None and self._ask([job], over=()))

    def abandoned(self, jobs: Iterable[Job]) -> list[Job]:
        """Those of all requests at hand that are to be cancelled. Nothing is asked where none wants listeners.

        Requests that were at hand and are no more have ended, or are another worker's, whose listeners go on.
        """
        watched = [job for job in jobs if job.abandon_after is not None]
        over = self._watched - {job.request_id for job in watched}
        return self._ask(watched, over) if watched or over else []

    def _ask(self, jobs: Collection[Job], over: Collection[str]) -> list[Job]:
        limits = {job.request_id: job.abandon_after for job in jobs if job.abandon_after is not None}
        try:
            silence = self._listeners.silence(limits, forget=over)
        except REDIS_ERRORS as error:
            self.lost_sight()
            logger.warning("nobody is asked who listens: %s", error)
            return []
        self._watched = (self._watched | limits.keys()).difference(over)
        sighted = self._clock() - self._sighted_since
        return [job for job in jobs if min(silence[job.request_id], sighted) >= limits[job.request_id]]
