"""`TokenSpeed`: how many tokens this worker computes in a second while it is busy."""

import time
from collections.abc import Callable
from typing import Final

HALF_LIFE_SECONDS: Final = 60.0
"""A busy second counts half as much as one that is so many busy seconds later."""
LEAST_SECONDS: Final = 10.0
"""No speed is reported before the worker was busy for so long."""


class TokenSpeed:
    """Measures the speed of a full worker. Time in which it is not busy changes nothing.

    It counts the tokens that a request costs its tenant, so that costs divided by this speed are seconds of work: those
    of the prompt, cached ones included, at the first token or at the row of an input, and each output token.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens = 0.0
        self._seconds = 0.0
        """Busy seconds, weighted as `_tokens`."""
        self._busy_since: tuple[float, int] | None = None
        """Time and total of the last observation; None if the worker was not busy then."""

    def observe(self, num_tokens: int, *, is_busy: bool) -> None:
        """Record the number of tokens since the start of the worker. Call it about once a second.

        The time between two calls counts if the worker is busy at both.
        """
        now = self._clock()
        if is_busy and self._busy_since is not None:
            began, before = self._busy_since
            weight = 0.5 ** ((now - began) / HALF_LIFE_SECONDS)
            self._tokens = weight * self._tokens + num_tokens - before
            self._seconds = weight * self._seconds + now - began
        self._busy_since = (now, num_tokens) if is_busy else None

    @property
    def tokens_per_second(self) -> float | None:
        """The speed; None if the worker was not busy for long enough, or published nothing in that time."""
        if self._seconds < LEAST_SECONDS or self._tokens <= 0:
            return None
        return self._tokens / self._seconds
