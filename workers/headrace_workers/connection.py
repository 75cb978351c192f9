"""The worker's connection to a Redis that is away: asked for once a second, while the engine goes on.

Celery would sleep between its attempts, up to half a minute, on the thread that reads from the engine; the leases of a
worker that comes back so late are another worker's by then, and its liveness probe has failed.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from celery.app.amqp import AMQP
from kombu import Connection

_RETRY_SECONDS = 1.0


class PatientConnection(Connection):
    """A connection whose attempts are one second apart; `app.while_disconnected` is called to pass that second."""

    app: Any
    """Set on a subclass for each application."""

    def ensure_connection(
        self,
        errback: Callable[..., None] | None = None,
        max_retries: int | None = None,
        *_: Any,
        callback: Callable[[], None] | None = None,
        **options: Any,
    ) -> Connection:
        on_loop_thread = threading.current_thread() is threading.main_thread()
        pass_time = self.app.while_disconnected if on_loop_thread else time.sleep

        def wait() -> None:
            if callback is not None:
                callback()  # Celery's: ends the worker if it is to end
            pass_time(_RETRY_SECONDS)

        # A server that takes connections but refuses commands brings Celery back here at once, again and again.
        pass_time(0.0)
        pauses = {"interval_start": 0, "interval_step": 0, "interval_max": 0}
        return super().ensure_connection(errback, max_retries, **{**options, **pauses}, callback=wait)


class WorkerAMQP(AMQP):
    """Celery's maker of connections."""

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        self.Connection = type("WorkerConnection", (PatientConnection,), {"app": app})
