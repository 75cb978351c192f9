"""`Quarantine`: finds the request that kills the engine, so that its neighbours need not pay for it.

A request that was in two engine processes when they died, of whichever workers, is a suspect. Suspects run alone, one
after the other, in an engine that has no other request: whoever kills that one, too, is the poison, and whoever has
generated some tokens is acquitted. The others wait meanwhile; those that are acquitted may go to another worker.
"""

import logging
from collections.abc import Collection, Iterable

from headrace_broker.connections import REDIS_ERRORS
from headrace_broker.engine_losses import EngineLosses
from headrace_workers.job import Job

logger = logging.getLogger(__name__)

SUSPECT_LOSSES = 2
PROBATION_TOKENS = 8
"""What killed the engine lies at the very next token of a request that continues where it was."""


class Quarantine:
    """Says which requests may be in the engine. Redis's errors are logged: what it says here holds without."""

    def __init__(self, losses: EngineLosses) -> None:
        self._losses = losses
        self._unrecorded: set[Job] = set()
        """Jobs whose count the next worker would not know."""
        self._alone: Job | None = None
        self._tokens_before = 0
        self._suspect_waits = False

    @property
    def alone(self) -> Job | None:
        """The suspect that has the engine to itself; None while all may run."""
        return self._alone

    @property
    def keeps_others_out(self) -> bool:
        """Whether nothing more is to be taken: a suspect has the engine to itself, or waits for that."""
        return self._alone is not None or self._suspect_waits

    def engine_lost(self, jobs: Iterable[Job]) -> Job | None:
        """An engine died that had these requests. Returns the one that is to blame, where that is known."""
        alone, self._alone = self._alone, None
        jobs = list(jobs)
        if alone is not None:
            return alone if alone in jobs else None  # the others waited outside
        for job in jobs:
            if not _is_suspect(job):  # a suspect waited outside
                job.engine_losses += 1
                self._unrecorded.add(job)
        self.record(jobs)
        return None

    def record(self, jobs: Collection[Job]) -> None:
        """Tell the next worker of the losses that it does not know of yet; again from the heartbeat."""
        self._unrecorded.intersection_update(jobs)
        if not self._unrecorded:
            return
        try:
            self._losses.record({job.request_id: job.engine_losses for job in self._unrecorded})
        except REDIS_ERRORS as error:
            logger.warning("the engine's death is not recorded yet for %d request(s): %s", len(self._unrecorded), error)
        else:
            self._unrecorded.clear()

    def admits(self, job: Job) -> bool:
        """Whether a request that comes now goes to the engine at once."""
        if _is_suspect(job):
            self._suspect_waits = True
            return False
        return self._alone is None

    def is_time(self, jobs: Iterable[Job]) -> bool:
        """Whether a suspect waits for the engine, and all other requests have ended."""
        if not self._suspect_waits or self._alone is not None:
            return False
        suspicions = [_is_suspect(job) for job in jobs]
        self._suspect_waits = any(suspicions)
        return self._suspect_waits and all(suspicions)

    def choose(self, jobs: Iterable[Job]) -> list[Job]:
        """Of all requests at hand, those to send to an engine that has none."""
        jobs = list(jobs)
        self._suspect_waits = False
        self._alone = next((job for job in jobs if _is_suspect(job)), None)
        if self._alone is None:
            return jobs
        self._tokens_before = self._alone.num_tokens
        return [self._alone]

    @property
    def is_acquitted(self) -> bool:
        """Whether the suspect has shown that it does not kill the engine."""
        return self._alone is not None and self._alone.num_tokens - self._tokens_before >= PROBATION_TOKENS

    def acquit(self, job: Job) -> None:
        """Whoever has it next may run it with others."""
        job.engine_losses = 0
        try:
            self._losses.forget(job.request_id)
        except REDIS_ERRORS as error:
            logger.warning("an acquittal is not recorded, so the request will run alone again: %s", error)


def _is_suspect(job: Job) -> bool:
    return job.engine_losses >= SUSPECT_LOSSES
