"""What an attempt to deliver means: delivered, again later, given up, or the receiver is gone. Pure."""

from dataclasses import dataclass
from typing import Final, Literal

SCHEDULE: Final = (0.0, 5.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0, 72000.0, 86400.0)
"""Seconds before each attempt, after the one before."""
JITTER: Final = 0.2
"""A delay is longer by up to this part of it, so that what failed together does not come again together."""
LIFE_SECONDS: Final = 4 * 86400
"""An event is forgotten after it; the whole schedule with all its jitter is shorter, by which slowing down is paid."""
_LONGEST_WAIT: Final = 86400.0
_OVERLOADED: Final = (429, 502, 504)
_FIRST_PAUSE: Final = 5.0
_LONGEST_PAUSE: Final = 600.0

Outcome = Literal["delivered", "failed", "given_up", "gone"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """What came of one POST."""

    status: int | None = None
    """None where no answer came."""
    failure: str = ""
    """Why no answer came, for the log."""
    retry_after: float | None = None
    """Seconds that the receiver asks for."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do after an attempt."""

    outcome: Outcome
    after: float = 0.0
    """Seconds until the next attempt of this delivery, where there is one."""
    pause: float = 0.0
    """Seconds for which the endpoint gets nothing at all."""


def judge(attempt: Attempt, *, failed_before: int, slowed_before: int, jitter: float) -> Verdict:
    """Say what comes next.

    Args:
        failed_before: failed attempts of this delivery before this one.
        slowed_before: pauses of the endpoint since its last success.
        jitter: 0 to 1, drawn by the caller.
    """
    status = attempt.status
    if status is not None and 200 <= status < 300:
        return Verdict("delivered")
    asked = min(attempt.retry_after or 0.0, _LONGEST_WAIT)
    pause = asked
    if status in _OVERLOADED:
        pause = max(asked, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(slowed_before, 16)))
    if failed_before + 1 >= len(SCHEDULE):
        return Verdict("gone" if status == 410 else "given_up", pause=pause)
    after = max(SCHEDULE[failed_before + 1] * (1 + JITTER * jitter), asked)
    return Verdict("gone" if status == 410 else "failed", after=after, pause=pause)
