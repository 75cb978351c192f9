"""Celery's consumer, which loses no message that it cannot decode, and sends its events together."""

import logging
from typing import Any

from celery.worker.consumer import Consumer

logger = logging.getLogger(__name__)


class EngineConsumer(Consumer):
    """Selected by `worker_consumer`."""

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """Celery acknowledges such a message, and writes its body into the log. Here it becomes a dead letter."""
        logger.error("a message could not be decoded: %s", type(exc).__name__)
        message.reject_log_error(logger, self.connection_errors)

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:  # noqa: ARG002  # Celery's signature
        """Celery stores a failure under the id that the message names, which may be that of another's request.

        Here it becomes a dead letter, and whoever waits is told where the id is the message's own.
        """
        logger.error("a message names a task that there is not")
        message.reject_log_error(logger, self.connection_errors)

    def on_send_event_buffered(self) -> None:
        """Celery would send the events of each turn of its loop; here they wait for `flush_events`, or are 24."""

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Celery keeps for the next connection what it could not publish, but not what was still to be."""
        self.flush_events()
        super().on_connection_error_after_connected(exc)

    def flush_events(self) -> None:
        """Send what waits; once a second."""
        self._flush_events()
