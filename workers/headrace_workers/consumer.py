"""Celery's consumer, changed to dead-letter messages that it cannot use and to send its events in batches."""

from typing import Any

import structlog
from celery import signals
from celery.worker.consumer import Consumer

from headrace_broker.content import shown_encoding, shown_type
from headrace_broker.errors import MalformedMessageError
from headrace_broker.messages import TASK_NAME
from headrace_broker.reasons import DeadLetterReason

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)


class EngineConsumer(Consumer):
    """The setting `worker_consumer` makes Celery use this class."""

    def __init__(self, *args: Any, **options: Any) -> None:
        # Workers need no messages from each other, and an election publishes any task with this worker's rights.
        super().__init__(*args, **options, without_gossip=True, without_mingle=True)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """Dead-letter the message. Celery would acknowledge it and log its body."""
        why = str(exc) if isinstance(exc, MalformedMessageError) else type(exc).__name__
        self._refuse(message, why, DeadLetterReason.UNDECODABLE)

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:  # noqa: ARG002  # Celery's signature
        """Dead-letter a message that the strategy has answered, with the strategy's reason."""
        self._refuse(message, str(exc))
        signals.task_rejected.send(sender=self, message=message, exc=exc)

    def on_unknown_message(self, body: Any, message: Any) -> None:  # noqa: ARG002  # Celery's signature
        """As `on_decode_error`."""
        self._refuse(message, "it follows neither protocol 1 nor protocol 2 of Celery")

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:  # noqa: ARG002  # Celery's signature
        """Dead-letter the message. Its sender gets an answer if the id is the message's own.

        Celery would store a failure under the id that the message names, which may be another request's.
        """
        self._refuse(message, f"its task is not {TASK_NAME}, the only one of this queue")

    def _refuse(self, message: Any, why: str, reason: DeadLetterReason = DeadLetterReason.REJECTED) -> None:
        """Log the message without its contents and dead-letter it."""
        logger.error(
            "message refused",
            reason=reason.saying(why),
            content_type=shown_type(message.content_type),
            content_encoding=shown_encoding(message.content_encoding),
            bytes=len(message.body or b""),
            queue=str(message.delivery_info.get("routing_key") or message.delivery_info.get("exchange"))[:200],
        )
        if message.channel.leased:  # control messages need no acknowledgement
            message.channel.leases.dead_letter(message.delivery_tag, reason, why)

    def on_send_event_buffered(self) -> None:
        """Do nothing. Celery would send events in each turn of its loop. Here `flush_events` or the 24th event does."""

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Send pending events. Celery keeps events that it failed to publish, but not those still pending."""
        self.flush_events()
        super().on_connection_error_after_connected(exc)

    def flush_events(self) -> None:
        """Send pending events; called once a second."""
        self._flush_events()
