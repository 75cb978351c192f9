"""`TokenizerService`: takes calls of the model's tokenizer from Redis and has them answered, one at a time.

    Redis --call--> thread --wake-up--> event loop --> preparation's process --answer--> event loop --> thread --> Redis

The thread waits for Redis, so the event loop does not; the process tokenises, so neither does. No slot is needed.
"""

import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, Protocol

from headrace_broker.connections import REDIS_ERRORS
from headrace_broker.tokenizer_calls import TokenizerCall, TokenizerCalls
from headrace_monitoring.logging import frames

logger = logging.getLogger(__name__)

TAKE_SECONDS: Final = 1.0
"""After so long the thread looks whether the worker still takes calls."""


class AnswerCall(Protocol):
    """Has a call answered; on the event loop's thread."""

    def __call__(self, kind: str, body: bytes, answered: Callable[[bytes], None], /) -> None: ...


class TokenizerService:
    """Args:
    calls: those of the names that the worker serves.
    answer: has one answered.
    is_open: whether the worker can answer, and takes work; asked on the service's thread.
    """

    def __init__(self, calls: TokenizerCalls, answer: AnswerCall, is_open: Callable[[], bool]) -> None:
        self._calls: Final = calls
        self._answer: Final = answer
        self._is_open: Final = is_open
        self._stopped: Final = threading.Event()
        self._taken: Final[SimpleQueue[TokenizerCall]] = SimpleQueue()
        self._answers: Final[SimpleQueue[bytes | None]] = SimpleQueue()
        self._wake_up, self._wake = os.pipe()
        self._thread: Final = threading.Thread(target=self._run, name="tokenizer-calls", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def attach(self, hub: Any) -> None:
        """The event loop; again after each reconnect, which empties the loop."""
        hub.add_reader(self._wake_up, self._begin)

    def stop(self) -> None:
        """Take no more calls; does not wait. One that is being answered is not."""
        self._stopped.set()
        self._answers.put(None)

    def _begin(self) -> None:
        """On the event loop."""
        os.read(self._wake_up, 1)
        call = self._taken.get()
        self._answer(call.kind, call.body, self._answers.put)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                if not self._is_open():
                    self._stopped.wait(TAKE_SECONDS)
                    continue
                call = self._calls.take(TAKE_SECONDS)
                if call is not None:
                    self._serve(call)
            except REDIS_ERRORS as error:
                logger.warning("calls of the tokenizer wait for Redis: %s", error)
                self._stopped.wait(TAKE_SECONDS)
            except Exception as error:  # noqa: BLE001  # the next call is another one
                logger.error("a call of the tokenizer could not be answered: %s", frames(error))

    def _serve(self, call: TokenizerCall) -> None:
        self._taken.put(call)
        os.write(self._wake, b"\0")
        answer = self._answers.get()
        if answer is not None:
            self._calls.answer(call, answer)
