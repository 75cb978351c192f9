"""`Turn`: continues long work in the next turns of kombu's event loop."""

import os
from collections.abc import Callable
from typing import Any


class Turn:
    """Calls a function in each turn of kombu's event loop, after the other events of that turn."""

    def __init__(self) -> None:
        self._loop: Any = None
        self._fd: int | None = None

    def begin(self, loop: Any, callback: Callable[[], object]) -> None:
        """Call `callback` in each turn until `end`. kombu's `call_soon` could run it up to a second later."""
        if self._loop is None:
            self._fd = os.eventfd(1) if self._fd is None else self._fd  # always readable, as nothing reads it
            self._loop = loop
            loop.add_reader(self._fd, callback)

    def end(self) -> None:
        if self._loop is not None:
            self._loop.remove(self._fd)
            self._loop = None

    def close(self) -> None:
        """End, and close the file descriptor."""
        self.end()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
