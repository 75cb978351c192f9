"""Celery's consumer and strategy: they pass messages of Headrace's tasks to the worker's `Admission`.

`EngineConsumer` dead-letters messages that it cannot use, and sends its events in batches. Celery's default strategy
handles revocation, expiry and events. It gets `EnginePool` in place of Celery's pool. Requests take no slots of a pool,
so one worker process holds as many requests as the engine has slots.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import structlog
from celery import signals
from celery.exceptions import InvalidTaskError
from celery.worker.consumer import Consumer
from celery.worker.state import active_requests, requests, reserved_requests, task_ready
from celery.worker.strategy import default as default_strategy
from kombu.exceptions import OperationalError

from headrace_broker.content import require_accepted, shown_encoding, shown_type
from headrace_broker.errors import MalformedMessageError
from headrace_broker.queue.worker_port import DELIVERY, DeliveryInfo
from headrace_broker.server.connections import REDIS_ERRORS
from headrace_wire.codes import DeadLetterReason
from headrace_workers.celery.task import TASKS, EngineRequest
from headrace_workers.preparation.intake import MALFORMED
from headrace_workers.requests.admission import Admission

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
        """Dead-letter the message, as `on_decode_error` does."""
        self._refuse(message, "it follows neither protocol 1 nor protocol 2 of Celery")

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:  # noqa: ARG002  # Celery's signature
        """Dead-letter the message. Its sender gets an answer if the id is the message's own.

        Celery would store a failure under the id in the message, which may be the id of another request.
        """
        self._refuse(message, f"its task is none of {', '.join(task.name for task in TASKS)}")

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
        """Do nothing. Celery would send events in each turn of its loop. Here `flush_events` or the 24th does so."""

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Send pending events. Celery keeps events that it failed to publish, but not those still pending."""
        self.flush_events()
        super().on_connection_error_after_connected(exc)

    def flush_events(self) -> None:
        """Send pending events; called once a second."""
        self._flush_events()


_NO_BODY: Final[tuple[list[Any], dict[str, Any], dict[str, Any]]] = ([], {}, {})


class EnginePool:
    """Replaces Celery's pool. For a request, Celery calls no other method of it."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def apply_async(self, _target: Any, *, callback: Any, **_: Any) -> None:
        self._admission.accept(callback.__self__)  # the bound EngineRequest.on_success


class ConsumerProxy:
    """Wraps Celery's consumer with another pool."""

    def __init__(self, consumer: Any, pool: EnginePool) -> None:
        self._consumer = consumer
        self.pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)


def engine_strategy(task: Any, app: Any, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Make the handler of `GenerateTask`'s messages."""
    admission: Admission = task.step.dispatcher.admission
    task.Request = type(
        "BoundEngineRequest", (EngineRequest,), {"admission": admission, "callbacks": task.step.callbacks}
    )
    handler = default_strategy(task, app, ConsumerProxy(consumer, EnginePool(admission)), **options)

    def handle(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **rest: Any) -> Any:
        if "id" not in message.headers:
            raise InvalidTaskError("malformed message: it has no id")
        request_id = _id_of(message)
        about = {} if request_id is None else {"request_id": request_id}  # in Celery's log lines too
        try:
            with structlog.contextvars.bound_contextvars(**about), _registration(message):
                if body is not None:
                    # Headers without a task show protocol 1. Only a valid id lets it be converted to protocol 2.
                    raise MalformedMessageError("its headers have no task, and its body has no valid id of protocol 1")
                require_accepted(message.content_type)
                # Celery sees an empty body. Decoding a large one takes seconds: `preparation/process.py` does that.
                message._decoded_cache = _NO_BODY
                message.headers.pop("shadow", None)  # a task name from the sender, which Celery would log and announce
                return handler(message, body, ack, reject, callbacks, **rest)
        except (*REDIS_ERRORS, OperationalError):
            raise  # the message is fine: the transport returns it to the queue
        except Exception as error:  # noqa: BLE001  # any client may push any bytes to the queue
            # The text of any other error may quote the message.
            why = f"the message is malformed: {error}" if isinstance(error, MalformedMessageError) else MALFORMED
            if request_id is not None:
                delivery = message.delivery_info.get(DELIVERY) or DeliveryInfo()
                admission.settlement.refuse_malformed(request_id, delivery, why, message.content_type)
            raise InvalidTaskError(why) from None  # the consumer rejects the message

    return handle


@contextmanager
def _registration(message: Any) -> Iterator[None]:
    """Keep Celery's table of requests by ID correct while a message is accepted.

    If an exception is raised, the message's own request is removed. If this worker still holds another request with
    the ID, that request is restored, because Celery looks there for a request to terminate.
    """
    request_id = _id_of(message)
    before = requests.get(request_id)
    try:
        yield
    except BaseException:
        request = requests.get(request_id)
        if request is not None and request._message is message:
            task_ready(request)
        raise
    finally:
        if before in active_requests or before in reserved_requests:
            requests.setdefault(request_id, before)


def _id_of(message: Any) -> str | None:
    request_id = message.headers.get("id")
    return request_id if isinstance(request_id, str) else None
