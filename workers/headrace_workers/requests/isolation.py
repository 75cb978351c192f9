"""`Isolation`: finds the request that kills the engine, so that other requests do not fail with it.

A request that was in two engine processes when they died, on any worker, is a suspect. Suspects run alone, one at a
time. A suspect that kills its engine is the poison request. A suspect that generates some tokens is cleared. The other
requests wait meanwhile. A cleared request may continue on another worker.
"""

import logging
from collections.abc import Collection, Iterable

from headrace_broker.server.connections import REDIS_ERRORS
from headrace_workers.requests.job import Job
from headrace_workers.requests.stream_homes import StreamHomes

logger = logging.getLogger(__name__)

SUSPECT_LOSSES = 2
TOKENS_TO_CLEAR = 8
"""A resumed request that kills the engine does so at its next token. The other tokens are a margin.

Rows of a pooling model count as tokens.
"""


class Isolation:
    """Decides which requests may be in the engine. It logs Redis errors and decides without Redis."""

    def __init__(self, homes: StreamHomes) -> None:
        self._homes = homes
        self._unrecorded: set[Job] = set()
        """Jobs whose number of engine losses is not in Redis yet."""
        self.alone: Job | None = None
        """The suspect that has the engine to itself; None while all may run."""
        self._tokens_before = 0
        self._suspect_waits = False

    @property
    def blocks_new_requests(self) -> bool:
        """Whether the worker must take no messages: a suspect has the engine to itself, or waits for it."""
        return self.alone is not None or self._suspect_waits

    def engine_lost(self, jobs: Iterable[Job]) -> Job | None:
        """Count the loss for the requests that were in the engine. Returns the poison request, if it is known."""
        alone, self.alone = self.alone, None
        jobs = list(jobs)
        if alone is not None:
            return alone if alone in jobs else None  # no other job was in the engine
        for job in jobs:
            if not _is_suspect(job):  # a suspect was not in the engine
                job.engine_losses += 1
                self._unrecorded.add(job)
        self.record(jobs)
        return None

    def record(self, jobs: Collection[Job]) -> None:
        """Write engine losses to Redis for the next worker. The heartbeat retries failed writes."""
        self._unrecorded.intersection_update(jobs)
        if not self._unrecorded:
            return
        by_home: dict[str, list[Job]] = {}
        for job in self._unrecorded:
            by_home.setdefault(job.home, []).append(job)
        for home, there in by_home.items():
            try:
                with self._homes.writing(home) as writer:
                    writer.record_engine_losses({job.request_id: job.engine_losses for job in there})
            except REDIS_ERRORS as error:
                logger.warning("engine loss not recorded yet for %d request(s): %s", len(there), error)
            else:
                self._unrecorded.difference_update(there)

    def admits(self, job: Job) -> bool:
        """Return whether a new request goes to the engine at once."""
        if _is_suspect(job):
            self._suspect_waits = True
            return False
        return self.alone is None

    def is_due(self, jobs: Iterable[Job]) -> bool:
        """Return whether a suspect waits for the engine, and all other requests have ended."""
        if not self._suspect_waits or self.alone is not None:
            return False
        suspicions = [_is_suspect(job) for job in jobs]
        self._suspect_waits = any(suspicions)
        return self._suspect_waits and all(suspicions)

    def choose(self, jobs: Iterable[Job]) -> list[Job]:
        """Choose the jobs to send to an engine that has none."""
        jobs = list(jobs)
        self._suspect_waits = False
        self.alone = next((job for job in jobs if _is_suspect(job)), None)
        if self.alone is None:
            return jobs
        self._tokens_before = self.alone.num_done
        return [self.alone]

    @property
    def is_cleared(self) -> bool:
        """Whether the suspect has generated enough tokens without killing the engine."""
        return self.alone is not None and self.alone.num_done - self._tokens_before >= TOKENS_TO_CLEAR

    def clear(self, job: Job) -> None:
        """Reset a suspect's engine losses, so that any worker may run it with others."""
        job.engine_losses = 0
        try:
            with self._homes.writing(job.home) as writer:
                writer.forget_engine_losses(job.request_id)
        except REDIS_ERRORS as error:
            logger.warning("engine losses not reset in Redis, the request will run alone again: %s", error)


def _is_suspect(job: Job) -> bool:
    return job.engine_losses >= SUSPECT_LOSSES
