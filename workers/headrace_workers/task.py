"""The Celery task `headrace.generate`, and what Celery holds of one received message."""

import time
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgpack
from celery import Task
from celery.app.trace import fast_trace_task
from celery.worker.request import Request
from celery.worker.state import task_ready

from headrace_broker.messages import TASK_NAME
from headrace_broker.reasons import DeadLetterReason
from headrace_broker.transport import CONTENT, OVER_QUOTA, PREEMPTIONS, QUEUED_AT, STEP
from headrace_workers.result_backend import CONTENT_TYPE

if TYPE_CHECKING:
    from headrace_workers.dispatcher import Dispatcher

OUTCOME: ContextVar[dict[str, Any]] = ContextVar("headrace_outcome")
"""The result of the request whose task is being run; set around the run by `EngineRequest.finish`."""

# In place of the message's own body: neither its prompt nor its links are wanted when the task has been done.
_EMPTY_BODY: Final = msgpack.packb([[], {}, {}])
_LINKS: Final = ("callbacks", "errbacks", "chain", "chord")


class EngineRequest(Request):
    """A received message whose work is done by the engine, not by Celery's pool. Implements `CeleryRequest`."""

    dispatcher: "Dispatcher"
    """Set by the strategy, on a subclass for each worker."""
    acknowledged: bool

    def __init__(self, message: Any, **options: Any) -> None:
        super().__init__(message, **options)
        self._received_at = time.monotonic()
        self._burial: tuple[DeadLetterReason, str] | None = None
        """Why the message becomes a dead letter when it is settled; None acknowledges it."""
        self._request_dict[CONTENT_TYPE] = self.content_type  # the backend sees this map alone

    @property
    def content_type(self) -> str:
        """Of the message, and of its result."""
        content_type: str = self._message.content_type
        return content_type

    @property
    def argsrepr(self) -> str:
        """Empty: a stock producer puts a readable copy of the prompt here, and Celery would log and announce it."""
        return ""

    @property
    def kwargsrepr(self) -> str:
        """As `argsrepr`."""
        return ""

    def info(self, safe: bool = False) -> dict[str, Any]:  # noqa: ARG002  # Celery's signature
        """What `celery inspect` shows: never the prompt."""
        return {**super().info(), "args": "", "kwargs": ""}

    @property
    def lease_id(self) -> str:
        return self._message.delivery_tag

    @property
    def over_quota(self) -> int:
        """The quota, where the tenant has too many requests in the queue and this one is to be refused; else 0."""
        quota: int = self._message.delivery_info.get(OVER_QUOTA, 0)
        return quota

    @property
    def content(self) -> str:
        """The digest of what the message asks for; see `envelope.content_digest`."""
        content: str = self._message.delivery_info.get(CONTENT, "")
        return content

    @property
    def queued_at(self) -> float | None:
        """Since when the message waits by Redis's clock, as a moment of the monotonic clock; None if not known."""
        moment: float | None = self._message.delivery_info.get(QUEUED_AT)
        return moment

    @property
    def step(self) -> int:
        """Priority step of the list that the message came by."""
        step: int = self._message.delivery_info.get(STEP, 0)
        return step

    @property
    def preemptions(self) -> int:
        """How often the request made room for one of a better level."""
        preemptions: int = self._message.delivery_info.get(PREEMPTIONS, 0)
        return preemptions

    def finish(self, result: dict[str, Any]) -> None:
        """Let Celery run the task: it stores the result, announces it and acknowledges. On the finisher's thread."""
        headers = {name: value for name, value in self._request_dict.items() if name not in _LINKS}
        token = OUTCOME.set(result)
        try:
            failed, returned, _ = fast_trace_task(
                self._type, self.id, headers, _EMPTY_BODY, "application/x-msgpack", "binary"
            )
        finally:
            OUTCOME.reset(token)
        if failed:  # the task itself cannot fail; Celery would acknowledge what it could not store
            raise returned.exception
        # A success is announced without its text.
        self.on_success((False, "", time.monotonic() - self._received_at))

    def finish_as_dead_letter(self, reason: DeadLetterReason, detail: str) -> None:
        """Let `finish` make the message a dead letter instead of acknowledging it."""
        self._burial = reason, detail

    def acknowledge(self) -> None:
        """Celery's, when the result is stored; on the finisher's thread."""
        if self._burial is None:
            super().acknowledge()
        elif not self.acknowledged:
            self.acknowledged = True
            leases = self._message.channel.leases
            self.dispatcher.settlement.call_soon(partial(leases.dead_letter, self.lease_id, *self._burial))

    def cost(self, tokens: int) -> None:
        """So many tokens, of prompt and output, the tenant pays when the message is acknowledged."""
        self._message.channel.leases.cost(self.lease_id, tokens)

    def hand_back(self, *, is_counted: bool = False, is_preempted: bool = False) -> None:
        """Put the message back into its queue, to be taken next.

        The delivery counts if `is_counted` is set: wherever it is not the fleet's own doing. Otherwise a message that
        cannot be served would come back for ever. It is counted how often a request `is_preempted`.
        """
        self._settled()
        self._message.channel.leases.release(self.lease_id, is_counted=is_counted, is_preempted=is_preempted)
        self.send_event("task-rejected", requeue=True)

    def postpone(self, seconds: float, *, keeps_place: bool = False) -> None:
        """Put the message back after so long, until which it is in no worker's hands.

        With `keeps_place` it goes back to its place, and has waited since it came. Else this is its own ETA, from which
        on it waits.
        """
        self._settled()
        self._message.channel.leases.postpone(self.lease_id, seconds, keeps_place=keeps_place)
        self.send_event("task-rejected", requeue=True)

    def set_aside(self) -> None:
        """Make the message a dead letter, as its request id is another message's, whose result is not touched."""
        self._settled()
        self._message.channel.leases.dead_letter(self.lease_id, DeadLetterReason.DUPLICATE_ID)
        self.send_event("task-rejected", requeue=False)

    def let_go(self) -> None:
        """Hold the message no longer: it is delivered again when its lease has run out."""
        self._settled()
        self._message.channel.leases.let_go(self.lease_id)

    def _settled(self) -> None:
        task_ready(self)
        self.acknowledged = True

    def terminate(self, pool: Any, signal: Any = None) -> None:  # noqa: ARG002  # Celery's signature
        """Celery's revoke with terminate=True."""
        self.dispatcher.terminate(self.id)

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:  # noqa: ARG002
        """Celery's cold shutdown: the worker's own step hands the request back, so nothing is announced."""
        self._already_cancelled = True

    def announce_terminated(self) -> None:
        """Store, announce and acknowledge that the request was revoked while it ran."""
        super()._announce_revoked("terminated", True, "SIGTERM", False)

    def announce_terminated_in_queue(self) -> None:
        """As `announce_terminated`, for a request that had not begun."""
        self._announce_revoked("terminated", True, "SIGTERM", False)

    def reject_undecodable(self, why: str) -> None:
        """Make the message a dead letter, as its body cannot be read."""
        self._settled()
        self._message.channel.leases.dead_letter(self.lease_id, DeadLetterReason.REJECTED, why)
        self.send_event("task-rejected", requeue=False)

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        """Dropped before the engine ever saw it. Celery would store that on the event loop's thread."""
        self._already_revoked = True
        announce = partial(super()._announce_revoked, reason, terminated, signum, expired)
        self.dispatcher.settlement.revoked_in_queue(self, reason, announce)


class ResultBackend:
    """Celery's backend, which stores no failure.

    The task itself cannot fail. Celery takes a result that could not be stored for a failure, and would store that if
    Redis is back by then; but the message is delivered again, and its result stored.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def mark_as_failure(self, *_: Any, **__: Any) -> None:
        """Nothing: see above."""


class GenerateTask(Task):
    """Runs when the engine is done with the request: Celery then stores the result and fires signals."""

    name = TASK_NAME
    Strategy = "headrace_workers.strategy:engine_strategy"
    Request = EngineRequest
    acks_late = True
    ignore_result = False
    track_started = False
    # Celery would write the beginning of the result, which is somebody's text, into log and events.
    resultrepr_maxsize = 0

    @property
    def backend(self) -> ResultBackend:
        return ResultBackend(super().backend)

    def run(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        return OUTCOME.get()
