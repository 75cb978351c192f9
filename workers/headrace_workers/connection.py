"""Reconnects to Redis once a second, while the engine continues.

Celery would sleep up to half a minute between attempts, on the thread that reads from the engine. In such a pause
this worker loses its leases to other workers and fails its liveness probe.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from celery.app.amqp import AMQP
from kombu import Connection

_RETRY_SECONDS = 1.0


class RetryingConnection(Connection):
    """A connection with one second between its attempts. It calls `app.while_disconnected` for that second."""

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
                callback()  # Celery's callback, which ends the worker if it must stop
            pass_time(_RETRY_SECONDS)

        # If a server accepts connections but refuses commands, Celery calls this again and again without a pause.
        pass_time(0.0)
        pauses = {"interval_start": 0, "interval_step": 0, "interval_max": 0}
        return super().ensure_connection(errback, max_retries, **{**options, **pauses}, callback=wait)


class WorkerAMQP(AMQP):
    """Makes Celery's connections."""

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        self.Connection = type("WorkerConnection", (RetryingConnection,), {"app": app})
