"""`FileLookups`: file system calls on threads of their own, because a call may hang for ever."""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

logger = logging.getLogger(__name__)

MAX_LOOKUPS: Final = 8
"""The most lookups at once, because a thread that hangs on a dead mount cannot be ended."""


class FileLookups:
    """Run each lookup on a thread of its own, and only one of each name at a time."""

    def __init__(self) -> None:
        self._hub: Any = None
        self._running: dict[str, float] = {}
        """The time of its start, by name."""

    def attach(self, hub: Any) -> None:
        """Set the event loop, on whose thread callbacks run."""
        self._hub = hub

    def submit(self, name: str, look_up: Callable[[], Any], callback: Callable[[Any], None], longest: float) -> bool:
        """Start a lookup. `callback` gets its result on the event loop's thread, or None if it raised.

        If a lookup of this name runs already, start nothing and drop the callback: the running one serves all callers.
        Return False if that one has taken more than `longest` seconds, if too many lookups run, or if no thread can be
        started.
        """
        if name in self._running:
            return time.monotonic() - self._running[name] <= longest
        if len(self._running) >= MAX_LOOKUPS:
            return False
        self._running[name] = time.monotonic()
        try:
            threading.Thread(target=self._run, args=(name, look_up, callback), name="file-lookup", daemon=True).start()
        except RuntimeError as error:
            del self._running[name]
            logger.warning("file lookup not started: %s", error)
            return False
        return True

    def _run(self, name: str, look_up: Callable[[], Any], callback: Callable[[Any], None]) -> None:
        try:
            found = look_up()
        except Exception as error:  # noqa: BLE001  # the callback must run
            logger.warning("file lookup failed: %s", type(error).__name__)
            found = None
        self._hub.call_soon(partial(self._finish, name, found, callback))

    def _finish(self, name: str, found: Any, callback: Callable[[Any], None]) -> None:
        del self._running[name]
        callback(found)
