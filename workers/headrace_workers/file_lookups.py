"""`FileLookups`: questions to the file system, which may hang for ever, beside the worker's event loop."""

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final

logger = logging.getLogger(__name__)

MOST_LOOKUPS: Final = 8
"""At once; a thread that a dead mount holds cannot be ended."""


class FileLookups:
    """Each question is asked by a thread of its own, and only once at a time."""

    def __init__(self) -> None:
        self._hub: Any = None
        self._asked: set[str] = set()

    def attach(self, hub: Any) -> None:
        """The event loop, on whose thread answers are given."""
        self._hub = hub

    def submit(self, name: str, ask: Callable[[], Any], answer: Callable[[Any], None]) -> bool:
        """Ask, and call `answer` on the event loop's thread; with None where that fails.

        Where the same is being asked, nothing is asked or kept: the answer to the first one is for all. Returns False
        where too many lookups hang, or no thread can be started.
        """
        if name in self._asked:
            return True
        if len(self._asked) >= MOST_LOOKUPS:
            return False
        self._asked.add(name)
        try:
            threading.Thread(target=self._ask, args=(name, ask, answer), name="file-lookup", daemon=True).start()
        except RuntimeError as error:
            self._asked.remove(name)
            logger.warning("the file system could not be asked: %s", error)
            return False
        return True

    def _ask(self, name: str, ask: Callable[[], Any], answer: Callable[[Any], None]) -> None:
        try:
            found = ask()
        except Exception as error:  # noqa: BLE001  # whoever asked is to have an answer
            logger.warning("the file system could not be asked: %s", type(error).__name__)
            found = None
        self._hub.call_soon(partial(self._answer, name, found, answer))

    def _answer(self, name: str, found: Any, answer: Callable[[Any], None]) -> None:
        self._asked.remove(name)
        answer(found)
