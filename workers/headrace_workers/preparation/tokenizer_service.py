"""`TokenizerService`: takes tokenizer calls from Redis and sends their answers, one at a time.

    Redis --call--> thread --wake-up--> event loop --> preparation's process --answer--> event loop --> thread --> Redis

The thread waits for Redis and the process tokenises, so neither blocks the event loop. A call takes no engine slot.
"""

import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final

from headrace_broker.client.tokenizer_calls import TokenizerCall, TokenizerCalls
from headrace_broker.server.connections import BLOCK_SECONDS, REDIS_ERRORS
from headrace_monitoring.logging import frames

logger = logging.getLogger(__name__)

PAUSE_SECONDS: Final = 1.0
"""How long nothing is taken while the worker drains, or after an error of Redis."""


AnswerCall = Callable[[str, bytes, Callable[[bytes], None]], None]
"""Starts to answer one call, without blocking. Arguments: the call's kind, its body, and a function that gets the
packed answer on the event loop's thread."""


class TokenizerService:
    """Args:
    calls: the calls for the worker's served names.
    answer: starts to answer one call.
    is_open: returns whether the worker takes calls now; runs on the service's thread.
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
        """Add the wake-up pipe to the event loop; call it again after each reconnect, which empties the loop."""
        hub.add_reader(self._wake_up, self._begin)

    def stop(self) -> None:
        """Take no more calls, and return at once. A call in progress gets no answer."""
        self._stopped.set()
        self._answers.put(None)

    def _begin(self) -> None:
        """Start to answer the next call, on the event loop's thread."""
        os.read(self._wake_up, 1)
        call = self._taken.get()
        self._answer(call.kind, call.body, self._answers.put)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                if not self._is_open():
                    self._stopped.wait(PAUSE_SECONDS)
                    continue
                call = self._calls.take(BLOCK_SECONDS)
                if call is not None:
                    self._serve(call)
            except REDIS_ERRORS as error:
                logger.warning("tokenizer calls waiting for Redis: %s", error)
                self._stopped.wait(PAUSE_SECONDS)
            except Exception as error:  # noqa: BLE001  # the next call may succeed
                logger.error("tokenizer call failed:\n%s", frames(error))

    def _serve(self, call: TokenizerCall) -> None:
        self._taken.put(call)
        os.write(self._wake, b"\0")
        answer = self._answers.get()
        if answer is not None:
            self._calls.answer(call, answer)
