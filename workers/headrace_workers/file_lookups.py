"""`FileLookups`: questions to the file system, which may hang for ever, beside the worker's event loop."""

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

logger = logging.getLogger(__name__)

MOST_LOOKUPS: Final = 8
"""At once; a thread that a dead mount holds cannot be ended."""


class FileLookups:
    """Each question is asked by a thread of its own; who asks the same meanwhile gets the same answer."""

    def __init__(self) -> None:
        self._hub: Any = None
        self._asked: dict[str, list[Callable[[Any], None]]] = {}

    def attach(self, hub: Any) -> None:
        """The event loop, on whose thread answers are given."""
        self._hub = hub

    def submit(self, name: str, ask: Callable[[], Any], answer: Callable[[Any], None]) -> bool:
        """Ask, and call `answer` on the event loop's thread; with None where that fails. False: too many hang."""
        if name in self._asked:
            self._asked[name].append(answer)
            return True
        if len(self._asked) >= MOST_LOOKUPS:
            return False
        self._asked[name] = [answer]
        threading.Thread(target=self._ask, args=(name, ask), name="file-lookup", daemon=True).start()
        return True

    def _ask(self, name: str, ask: Callable[[], Any]) -> None:
        try:
            found = ask()
        except Exception as error:  # noqa: BLE001  # whoever asked is to have an answer
            logger.warning("the file system could not be asked: %s", type(error).__name__)
            found = None
        self._hub.call_soon(lambda: self._answer(name, found))

    def _answer(self, name: str, found: Any) -> None:
        for answer in self._asked.pop(name):
            answer(found)
