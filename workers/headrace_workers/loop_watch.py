"""`LoopWatch`: measures how long one turn of the worker's event loop blocks everything else."""

import time
from collections.abc import Callable
from typing import Any


class LoopWatch:
    """Measures the event loop's turns.

    During a long turn no lease is renewed, no stream is written and no probe is answered. A timer would measure only
    the turn in which it is due.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._longest = 0.0
        self._turn_began: float | None = None

    def attach(self, hub: Any) -> None:
        """Watch this event loop; called again after each reconnect, which gives it another poller."""
        if not isinstance(hub.poller, _WatchedPoller):
            hub.poller = _WatchedPoller(hub.poller, self)
        self.pause()

    def pause(self) -> None:
        """Measure nothing until the loop's next wait."""
        self._turn_began = None

    def longest_turn(self) -> float:
        """Get the seconds of the longest turn since the last call, including the current one."""
        self._end_turn()
        longest, self._longest = self._longest, 0.0
        return longest

    def poll(self, wait: Callable[[], Any]) -> Any:
        """Return what `wait` returns. The time that it takes is not part of a turn."""
        self._end_turn()
        events = wait()
        self._turn_began = self._clock()
        return events

    def _end_turn(self) -> None:
        if self._turn_began is not None:
            self._longest = max(self._longest, self._clock() - self._turn_began)


class _WatchedPoller:
    """Wraps kombu's poller and reports its waits to a `LoopWatch`."""

    def __init__(self, poller: Any, watch: LoopWatch) -> None:
        self._poller = poller
        self._watch = watch

    def poll(self, timeout: float | None) -> Any:
        return self._watch.poll(lambda: self._poller.poll(timeout))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._poller, name)
