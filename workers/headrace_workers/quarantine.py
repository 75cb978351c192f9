"""`Quarantine`: finds the request that kills the engine, so that its neighbours need not pay for it.

A request that was in two engine processes when they died is a suspect. In the next process suspects run alone, one
after the other: whoever kills that one, too, is the poison, and whoever has generated some tokens is acquitted. The
others wait meanwhile; those that are acquitted may go to another worker.
"""

from collections.abc import Iterable

from headrace_workers.job import Job

SUSPECT_LOSSES = 2
PROBATION_TOKENS = 8
"""What killed the engine lies at the very next token of a request that continues where it was."""


class Quarantine:
    """Says which requests may be in the engine."""

    def __init__(self) -> None:
        self._alone: Job | None = None
        self._tokens_before = 0

    @property
    def alone(self) -> Job | None:
        """The suspect that has the engine to itself; None while all may run."""
        return self._alone

    def engine_lost(self, jobs: Iterable[Job]) -> Job | None:
        """An engine died that had these requests. Returns the one that is to blame, where that is known."""
        alone, self._alone = self._alone, None
        jobs = list(jobs)
        if alone is not None:
            return alone if alone in jobs else None  # the others waited outside
        for job in jobs:
            job.engine_losses += 1
        return None

    def choose(self, jobs: Iterable[Job]) -> list[Job]:
        """Of all requests at hand, those to send to an engine that has none."""
        jobs = list(jobs)
        self._alone = next((job for job in jobs if job.engine_losses >= SUSPECT_LOSSES), None)
        if self._alone is None:
            return jobs
        self._tokens_before = self._alone.num_tokens
        return [self._alone]

    @property
    def is_acquitted(self) -> bool:
        """Whether the suspect has shown that it does not kill the engine."""
        return self._alone is not None and self._alone.num_tokens - self._tokens_before >= PROBATION_TOKENS
