"""Passes messages of `headrace.generate` from Celery's consumer to the dispatcher.

Celery's default strategy does the rest: revocation, expiry and events. It gets `EnginePool` in place of Celery's pool.
No request takes a slot of that pool, so one worker process holds as many requests as the engine has room for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import structlog
from celery.exceptions import InvalidTaskError
from celery.worker.state import active_requests, requests, reserved_requests, task_ready
from celery.worker.strategy import default as default_strategy
from kombu.exceptions import OperationalError

from headrace_broker.connections import REDIS_ERRORS
from headrace_broker.content import require_accepted
from headrace_broker.errors import MalformedMessageError
from headrace_broker.transport import CONTENT
from headrace_workers.dispatcher import Dispatcher
from headrace_workers.intake import MALFORMED
from headrace_workers.task import EngineRequest

_NO_BODY: Final[tuple[list[Any], dict[str, Any], dict[str, Any]]] = ([], {}, {})


class EnginePool:
    """Replaces Celery's pool. A request calls no other method of it."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def apply_async(self, _target: Any, *, callback: Any, **_: Any) -> None:
        self._dispatcher.accept(callback.__self__)  # the bound EngineRequest.on_success


class ConsumerProxy:
    """Wraps Celery's consumer with another pool."""

    def __init__(self, consumer: Any, pool: EnginePool) -> None:
        self._consumer = consumer
        self.pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)


def engine_strategy(task: Any, app: Any, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Make the handler of `GenerateTask`'s messages; `consumer.controller.headrace` is the worker's `EngineStep`."""
    dispatcher: Dispatcher = consumer.controller.headrace.dispatcher
    task.Request = type("BoundEngineRequest", (EngineRequest,), {"dispatcher": dispatcher})
    handler = default_strategy(task, app, ConsumerProxy(consumer, EnginePool(dispatcher)), **options)

    def handle(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **rest: Any) -> Any:
        if "id" not in message.headers:
            raise InvalidTaskError("malformed message: it has no id")
        request_id = _id_of(message)
        about = {} if request_id is None else {"request_id": request_id}  # of Celery's log lines too
        try:
            with structlog.contextvars.bound_contextvars(**about), _registration(message):
                if body is not None:
                    # Of protocol 1, as the headers have no task. It would be converted with a valid id.
                    raise MalformedMessageError("its headers have no task, and its body has no valid id of protocol 1")
                require_accepted(message.content_type)
                # Celery sees an empty body. Decoding a large one takes seconds: `preparation_process.py` does that.
                message._decoded_cache = _NO_BODY
                message.headers.pop("shadow", None)  # a task name from the sender, which Celery would log and announce
                return handler(message, body, ack, reject, callbacks, **rest)
        except (*REDIS_ERRORS, OperationalError):
            raise  # the message is fine: the transport puts it back
        except Exception as error:  # noqa: BLE001  # any client may push any bytes to the queue
            # The text of any other error may quote the message.
            why = f"the message is malformed: {error}" if isinstance(error, MalformedMessageError) else MALFORMED
            if request_id is not None:
                content = message.delivery_info.get(CONTENT, "")
                dispatcher.settlement.refuse_malformed(request_id, content, why, message.content_type)
            raise InvalidTaskError(why) from None  # the consumer rejects the message

    return handle


@contextmanager
def _registration(message: Any) -> Iterator[None]:
    """Keep Celery's table of requests by ID correct while a message is accepted.

    If an exception is raised, the message's own request is removed. If this worker still holds another request with
    the ID, that request is put back, because Celery looks there for a request to terminate.
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
