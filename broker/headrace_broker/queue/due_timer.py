"""`DueTimer`: tells a worker when a waiting message must start by its due time."""

import time
from collections.abc import Callable
from typing import Any, Final

_LEAST_SECONDS: Final = 1.0
_MOST_SECONDS: Final = 60.0
"""How soon, and how late, a worker fetches again because of waiting messages with a due time."""


class DueTimer:
    """Calls back once, at the earliest of the times that it was given since. Runs on the thread of the event loop."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Final = callback
        self._timer: Any = None
        self._at = 0.0
        """When the timer ends, by the monotonic clock."""

    def set(self, loop: Any, seconds: float) -> None:
        """Call back on this event loop of Celery in so many seconds, or earlier."""
        seconds = min(max(seconds, _LEAST_SECONDS), _MOST_SECONDS)
        at = time.monotonic() + seconds
        if self._timer is not None:
            if self._at <= at:
                return
            self._timer.cancel()
        self._timer, self._at = loop.call_later(seconds, self._end), at

    def _end(self) -> None:
        self._timer = None
        self._callback()
