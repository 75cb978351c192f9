"""`Clock`: time that only a test moves."""

from __future__ import annotations


class Clock:
    """A process's own monotonic clock, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
