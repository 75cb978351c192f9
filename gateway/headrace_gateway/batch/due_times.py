"""`DueTimes`: when each line of a batch should be answered."""

from typing import Final

LEAST_WINDOW: Final = 7200
"""Seconds. The lines of a shorter window would all be urgent, before the interactive requests of other callers."""
_MOST_LEAD_SECONDS: Final = 600


class DueTimes:
    """Spreads the due times of a batch's lines evenly over its window, so that the last line is due at its end.

    The first line is due after a tenth of the window, at most ten minutes: a line takes its time, too.

    Only a part of the lines is in the queue at once. If all were due at the end, the queue would learn too late how
    many there are. With these due times, a batch that falls behind becomes urgent, and one that is ahead waits.

    Args:
        begin: of the window, in Unix seconds, and `end` likewise.
        total: number of lines.
        done: number of lines that need no answer any more.
    """

    def __init__(self, begin: float, end: float, *, total: int, done: int = 0) -> None:
        self._begin: Final = begin + min(_MOST_LEAD_SECONDS, (end - begin) / 10)
        self._seconds_of_line: Final = (end - self._begin) / max(1, total)
        self._end: Final = end
        self._place = done

    def next(self) -> float:
        """Return when the next line that is sent is due, in Unix seconds."""
        self._place += 1
        return min(self._end, self._begin + self._place * self._seconds_of_line)
