"""A Celery application that sends nothing: it collects the messages of callbacks, and the results it would store.

Celery's own code builds the messages, so they are those that a Celery worker would send. The script that acknowledges
the request writes them to Redis (`headrace_broker.queue.final_writes`).
"""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from celery import Celery
from celery._state import get_current_app
from kombu import Exchange, Queue
from kombu.transport import virtual
from kombu.utils.json import dumps
from kombu.utils.json import loads as kombu_loads

from headrace_broker.content import SERIALIZERS, dumps_result, loads
from headrace_broker.queue.final_writes import FinalWrites
from headrace_wire.errors import InvalidRequestError
from headrace_wire.values import is_request_id, named, shown
from headrace_workers.celery import result_backend
from headrace_workers.celery.chord_parts import ChordParts
from headrace_workers.preparation.callback_rules import CallbackRules

CHORD_SECONDS: Final = 86_400
"""How long the parts of a chord are kept after the last one, whatever the workers' `result_expires` says."""
_OWN_TASKS: Final = "headrace."
_COLLECTED: Final[ContextVar["Collected"]] = ContextVar("headrace_collected")


class Collected:
    """What the application collects for one request.

    Args:
        rules: name the tasks and queues that are permitted.
        tenant: of the request; a message to a Headrace worker is sent in its name.
        content_type: of the request; results are stored in it.
    """

    def __init__(self, rules: CallbackRules, tenant: str | None, content_type: str) -> None:
        self.writes = FinalWrites()
        self.rules = rules
        self.tenant = tenant
        self.content_type = content_type


class CollectingChannel(virtual.Channel):
    """Adds messages to the collected writes. It has no server, so it declares nothing."""

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **options: Any) -> None:
        """Ignore what has an exchange: broadcasts, such as the revocation of a failed chord's body."""
        if not exchange:
            super().basic_publish(message, exchange, routing_key, **options)

    def _put(self, queue: str, message: dict[str, Any], **_: Any) -> None:
        collected, headers = _COLLECTED.get(), message["headers"]
        _check_message(collected.rules, queue, message)
        if str(headers["task"]).startswith(_OWN_TASKS):
            for name in ("tenant", "key_name"):
                headers.pop(name, None)
            headers |= {} if collected.tenant is None else {"tenant": collected.tenant}
        collected.writes.push(queue, message["properties"].get("priority") or 0, dumps(message).encode())

    def exchange_declare(self, *_: Any, **__: Any) -> None: ...

    def queue_declare(self, queue: str, *_: Any, **__: Any) -> tuple[str, int, int]:
        return queue, 0, 0

    def queue_bind(self, *_: Any, **__: Any) -> None: ...


def _check_message(rules: CallbackRules, queue: str, message: dict[str, Any]) -> None:
    """Raise InvalidRequestError if a message is not permitted, whatever Celery has made of its signature."""
    headers, task_id = message["headers"], message["headers"].get("id")
    if queue not in rules.queues:
        raise InvalidRequestError(f"a callback goes to the queue {named(queue)}, which is not permitted")
    if not rules.permits(headers.get("task")):
        raise InvalidRequestError(f"the callback {named(headers.get('task'))} is not permitted")
    if not is_request_id(task_id) or task_id != message["properties"].get("correlation_id"):
        raise InvalidRequestError(f"the id of a callback must be its own, got {shown(task_id)}")
    if message.get("content-type") not in SERIALIZERS:
        raise InvalidRequestError(f"a callback has the content type {shown(message.get('content-type'))}")
    _, _, embed = loads(base64.b64decode(message["body"]), message["content-type"])
    rules.check_sent(embed)
    try:
        kombu_loads(dumps({**message, "body": ""}))
    except Exception:  # noqa: BLE001  # the decoders of kombu's own types raise errors of any class
        raise InvalidRequestError("the headers of a callback have values that no worker can read") from None


class CollectingTransport(virtual.Transport):
    Channel = CollectingChannel
    driver_type = driver_name = "collecting"


class _CollectingMixin:
    """Adds results of other tasks, such as the rest of a failed chain, to the collected writes."""

    app: Celery
    expires: int

    def on_task_call(self, producer: Any, task_id: str) -> None:
        """Do nothing: nobody waits for the results here."""

    def add_pending_result(self, result: Any, *_: Any, **__: Any) -> Any:
        """Do not subscribe to the result."""
        return result

    def remove_pending_result(self, result: Any) -> Any:
        return result

    def encode(self, data: Any) -> bytes:
        return dumps_result(data, _COLLECTED.get().content_type)

    def set_chord_size(self, group_id: str, chord_size: int) -> None:
        writes = _COLLECTED.get().writes
        writes.delete(self.get_key_for_group(group_id, ".c").decode())  # type: ignore[attr-defined]
        self._set_chord_key(self.get_key_for_group(group_id, ".s"), str(chord_size).encode())  # type: ignore[attr-defined]

    def _set_chord_key(self, key: bytes, value: bytes) -> None:
        _COLLECTED.get().writes.set(key.decode(), value, int(self.chord_expires or 0))  # type: ignore[attr-defined]

    def _store_result(
        self, task_id: str, result: Any, state: str, _traceback: Any = None, request: Any = None, **_: Any
    ) -> None:
        # a traceback would show lines of this worker, not of the task that failed
        meta = self._get_result_meta(result, state, None, request)  # type: ignore[attr-defined]
        key = self.get_key_for_task(task_id).decode()  # type: ignore[attr-defined]
        _COLLECTED.get().writes.answer(key, self.encode({**meta, "task_id": task_id}), self.expires)

    def on_chord_part_return(self, request: Any, state: str, result: Any, **_: Any) -> None:
        ChordParts(self, _COLLECTED.get().writes).returned(request, state, result)


class CollectingBackend(_CollectingMixin, result_backend.RedisBackend):
    """Reads from a server with a URL of its own."""


class CollectingSentinelBackend(_CollectingMixin, result_backend.SentinelBackend):
    """Reads from a server behind Sentinels."""


def make_callback_app(worker_app: Celery, rules: CallbackRules, serializer: str) -> Celery:
    """Make an application whose tasks have this serializer unless their signature says another one."""
    backend = worker_app.conf.result_backend
    app = Celery("headrace-callbacks", broker="memory://localhost", backend=backend, set_as_current=False)
    app.loader.override_backends = {
        scheme: f"{__name__}:{'CollectingSentinelBackend' if scheme == 'sentinel' else 'CollectingBackend'}"
        for scheme in result_backend.BACKENDS
    }
    app.conf.update(
        broker_transport=f"{__name__}:CollectingTransport",
        accept_content=list(SERIALIZERS.values()),
        task_serializer=serializer,
        result_serializer=serializer,
        task_default_queue=rules.queues[0],
        task_queues=[Queue(name, Exchange(name), routing_key=name) for name in rules.queues],
        task_create_missing_queues=False,
        task_publish_retry=False,
        result_chord_expires=CHORD_SECONDS,
        result_expires=worker_app.conf.result_expires,
        result_backend_transport_options=worker_app.conf.result_backend_transport_options,
        redis_backend_use_ssl=worker_app.conf.redis_backend_use_ssl,
    )
    # An errback whose task is registered runs here instead of being sent. Celery's own tasks start any others.
    for name in [name for name in app.tasks if name.startswith("celery.")]:
        app.tasks.unregister(name)
    # Celery would put readable copies of the arguments into headers.
    app.amqp.argsrepr_maxsize = app.amqp.kwargsrepr_maxsize = 0
    return app


@contextmanager
def collecting(app: Celery, collected: Collected) -> Iterator[FinalWrites]:
    """Collect what the application sends and stores in this thread."""
    token, before = _COLLECTED.set(collected), get_current_app()
    app.set_current()  # signatures inside groups and chords use it
    try:
        yield collected.writes
    finally:
        before.set_current()
        _COLLECTED.reset(token)
