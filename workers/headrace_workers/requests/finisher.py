"""`Finisher`: the thread on which Celery's end-of-task work runs.

Storing a result takes a round trip, or minutes of retries while Redis is unavailable. The event loop's thread renews
leases, so it must not wait for that. Celery's consumer passes acknowledgements to the event loop's thread.
"""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

import structlog

from headrace_monitoring.logging import frames

logger = logging.getLogger(__name__)


_Work = tuple[Callable[[], None], Callable[[Exception], None], dict[str, Any]]


class Finisher:
    """Runs calls one after the other. `busy` counts those that have not ended."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.busy = 0
        self._thread = threading.Thread(target=self._run, name="finisher", daemon=True)
        self._thread.start()

    def submit(self, finish: Callable[[], None], on_failure: Callable[[Exception], None], **about: Any) -> None:
        """Run `finish`, and `on_failure` with the error if it raises; both on the finisher's thread.

        `about` are fields of every log line written meanwhile.
        """
        with self._lock:
            self.busy += 1
        self._queue.put((finish, on_failure, about))

    def stop(self) -> None:
        """End the thread once all submitted calls have run. Does not wait."""
        self._queue.put(None)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            finish, on_failure, about = work
            with structlog.contextvars.bound_contextvars(**about):
                try:
                    finish()
                except Exception as error:  # noqa: BLE001  # from Redis, Celery or a signal's receiver
                    logger.error("request could not be finished, it will be delivered again: %s", frames(error))
                    on_failure(error)
                finally:
                    with self._lock:
                        self.busy -= 1
