"""Decides what follows an attempt: delivered, retry later, given up, or the receiver is gone. Pure."""

from dataclasses import dataclass
from typing import Final, Literal

SCHEDULE: Final = (0.0, 5.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0, 72000.0, 86400.0)
"""Seconds before each attempt, counted from the attempt before."""
JITTER: Final = 0.2
"""A delay is increased by up to this fraction of it, so that attempts that failed together do not repeat together."""
LIFE_SECONDS: Final = 4 * 86400
"""An event expires after this. The schedule with all its jitter is shorter; the rest allows for pauses."""
_LONGEST_WAIT: Final = 86400.0
_OVERLOADED: Final = (429, 502, 504)
_FIRST_PAUSE: Final = 5.0
_LONGEST_PAUSE: Final = 600.0

Outcome = Literal["delivered", "failed", "given_up", "gone"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """The result of one POST."""

    status: int | None = None
    """None if there was no response."""
    failure: str = ""
    """Why there was no response, for the log."""
    retry_after: float | None = None
    """The receiver's Retry-After, in seconds."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows an attempt."""

    outcome: Outcome
    after: float = 0.0
    """Seconds until the next attempt of this delivery, if there is one."""
    pause: float = 0.0
    """Seconds for which nothing is sent to the endpoint."""


def decide(attempt: Attempt, *, failed_before: int, slowed_before: int, jitter: float) -> Decision:
    """Decide what follows an attempt.

    Args:
        failed_before: failed attempts of this delivery before this one.
        slowed_before: pauses of the endpoint since its last success.
        jitter: from 0 to 1, drawn by the caller.
    """
    status = attempt.status
    if status is not None and 200 <= status < 300:
        return Decision("delivered")
    asked = min(attempt.retry_after or 0.0, _LONGEST_WAIT)
    pause = asked
    if status in _OVERLOADED:
        pause = max(asked, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(slowed_before, 16)))
    if failed_before + 1 >= len(SCHEDULE):
        return Decision("gone" if status == 410 else "given_up", pause=pause)
    after = max(SCHEDULE[failed_before + 1] * (1 + JITTER * jitter), asked)
    return Decision("gone" if status == 410 else "failed", after=after, pause=pause)
