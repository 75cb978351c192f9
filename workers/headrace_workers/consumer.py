"""Celery's consumer, which loses no message that it cannot use, and sends its events together."""

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
    """Selected by `worker_consumer`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        # Workers tell each other nothing that ours need, and an election publishes any task with this worker's rights.
        super().__init__(*args, **options, without_gossip=True, without_mingle=True)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """Celery acknowledges such a message, and writes its body into the log. Here it becomes a dead letter."""
        why = str(exc) if isinstance(exc, MalformedMessageError) else type(exc).__name__
        self._refuse(message, why, DeadLetterReason.UNDECODABLE)

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:  # noqa: ARG002  # Celery's signature
        """The strategy has answered the request, and says why."""
        self._refuse(message, str(exc))
        signals.task_rejected.send(sender=self, message=message, exc=exc)

    def on_unknown_message(self, body: Any, message: Any) -> None:  # noqa: ARG002  # Celery's signature
        """As `on_decode_error`."""
        self._refuse(message, "it is of neither of Celery's protocols 1 and 2")

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:  # noqa: ARG002  # Celery's signature
        """Celery stores a failure under the id that the message names, which may be that of another's request.

        Here it becomes a dead letter, and its sender is told where the id is the message's own.
        """
        self._refuse(message, f"its task is not {TASK_NAME}, the only one here")

    def _refuse(self, message: Any, why: str, reason: DeadLetterReason = DeadLetterReason.REJECTED) -> None:
        """Log what the message is, and never what it says."""
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
        """Celery would send the events of each turn of its loop; here they wait for `flush_events`, or are 24."""

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Celery keeps for the next connection what it could not publish, but not what was still to be."""
        self.flush_events()
        super().on_connection_error_after_connected(exc)

    def flush_events(self) -> None:
        """Send what waits; once a second."""
        self._flush_events()
