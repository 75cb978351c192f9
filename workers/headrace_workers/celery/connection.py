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

from headrace_broker.messages import TASK_NAME

_RETRY_SECONDS = 1.0


class RetryingConnection(Connection):
    """A connection with one second between its attempts. It calls `GenerateTask.while_disconnected` for that second.

    The second argument of the call is the error of the last attempt.
    """

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
        problem: str | None = None

        def pass_time(seconds: float) -> None:
            if on_loop_thread:
                self.app.tasks[TASK_NAME].while_disconnected(seconds, problem)
            else:
                time.sleep(seconds)

        def failed(error: Exception, interval: float) -> None:
            nonlocal problem
            problem = str(error)
            if errback is not None:
                errback(error, interval)

        def wait() -> None:
            if callback is not None:
                callback()  # Celery's callback, which ends the worker if it must stop
            pass_time(_RETRY_SECONDS)

        # If a server accepts connections but refuses commands, Celery calls this again and again without a pause.
        pass_time(0.0)
        pauses = {"interval_start": 0, "interval_step": 0, "interval_max": 0}
        return super().ensure_connection(failed, max_retries, **{**options, **pauses}, callback=wait)


class WorkerAMQP(AMQP):
    """Makes Celery's connections."""

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        self.Connection = type("WorkerConnection", (RetryingConnection,), {"app": app})
