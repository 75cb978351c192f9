"""The Celery tasks of a worker, and their Celery request for one received message."""

import time
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgpack
from celery import Task
from celery.app.trace import fast_trace_task
from celery.worker.request import Request
from celery.worker.state import task_ready

from headrace_broker.decisions import DECIDE_TASK
from headrace_broker.messages import TASK_NAME
from headrace_broker.pooling_messages import TASK_OF
from headrace_broker.queue.worker_port import DELIVERY, DeliveryInfo
from headrace_broker.results import Usage
from headrace_broker.streams.grant import Grant
from headrace_broker.usage.entry import UsageEntry, UsageKind, key_name_of
from headrace_wire.codes import DeadLetterReason
from headrace_workers.celery.result_backend import CONTENT_TYPE
from headrace_workers.requests.settlement import CANCELLED, EXPIRED

if TYPE_CHECKING:
    from headrace_workers.celery.bootsteps import EngineStep
    from headrace_workers.celery.callbacks import Callbacks
    from headrace_workers.requests.admission import Admission
    from headrace_workers.settings import WorkerSettings

OUTCOME: ContextVar[dict[str, Any]] = ContextVar("headrace_outcome")
"""The result of the request whose task runs now; `EngineRequest.finish` sets it for the run."""

# Replaces the message's own body: Celery needs neither its prompt nor its links once the request is done.
_EMPTY_BODY: Final = msgpack.packb([[], {}, {}])
_REVOKED: Final = {"error": CANCELLED.to_wire()}
_EXPIRED: Final = {"error": EXPIRED.to_wire()}
_LINKS: Final = ("callbacks", "errbacks", "chain", "chord")


class EngineRequest(Request):
    """A received message that the engine computes instead of Celery's pool. Implements `CeleryRequest`."""

    admission: "Admission"
    callbacks: "Callbacks"
    """The strategy sets both on a subclass for each worker."""
    acknowledged: bool

    def __init__(self, message: Any, **options: Any) -> None:
        super().__init__(message, **options)
        self._received_at = time.monotonic()
        self._dead_letter_reason: tuple[DeadLetterReason, str] | None = None
        """Why the message becomes a dead letter when it is settled; None if it is acknowledged instead."""
        self._request_dict[CONTENT_TYPE] = self.content_type  # the backend sees only this map

    @property
    def content_type(self) -> str:
        """Content type of the message and of its result."""
        return self._message.content_type

    @property
    def argsrepr(self) -> str:
        """Empty: a stock producer puts a readable copy of the prompt here, which Celery would log and announce."""
        return ""

    kwargsrepr = argsrepr

    def info(self, safe: bool = False) -> dict[str, Any]:  # noqa: ARG002  # Celery's signature
        """Describe the request for `celery inspect`, without its prompt."""
        return {**super().info(), "args": "", "kwargs": ""}

    @property
    def eta(self) -> None:
        """None: Celery would hold a message in memory until its ETA. `Admission` returns it to Redis instead."""

    @property
    def due(self) -> datetime | None:
        """The message's ETA. The request must not run before it."""
        return self._eta

    @property
    def lease_id(self) -> str:
        return self._message.delivery_tag

    @property
    def delivery(self) -> DeliveryInfo:
        """The facts that the queue has recorded about the message."""
        return self._message.delivery_info.get(DELIVERY) or DeliveryInfo()

    def regrant(self, at_least: int) -> Grant | None:
        """Give the lease a number above `at_least`; None if it is lost. Redis's errors pass through."""
        return self._message.channel.leases.regrant(self.lease_id, at_least)

    def finish(self, result: dict[str, Any]) -> None:
        """Store and announce the result through Celery's task, then acknowledge. Called on the finisher's thread."""
        headers = {name: value for name, value in self._request_dict.items() if name not in _LINKS}
        token = OUTCOME.set(result)
        try:
            failed, returned, _ = fast_trace_task(
                self._type, self.id, headers, _EMPTY_BODY, "application/x-msgpack", "binary"
            )
        finally:
            OUTCOME.reset(token)
        if failed:  # the task itself cannot fail, so the result was not stored; Celery would acknowledge it anyway
            raise getattr(returned.exception, "exc", returned.exception)  # billiard may wrap it
        self.call_back(result)
        # Announce the success without its text.
        self.on_success((False, "", time.monotonic() - self._received_at))

    def call_back(self, result: Mapping[str, Any]) -> None:
        """Let the settlement of the message send its callbacks with this result. Called on the finisher's thread."""
        writes = self.callbacks.final_writes(self, result, is_dead=self._dead_letter_reason is not None)
        if writes is not None:
            # not by the event loop, which does not keep the order of its calls: the acknowledgement could be first
            self._message.channel.leases.send(self.lease_id, writes)

    def finish_as_dead_letter(self, reason: DeadLetterReason, detail: str) -> None:
        """Make `finish` dead-letter the message instead of acknowledging it."""
        self._dead_letter_reason = reason, detail

    def acknowledge(self) -> None:
        """Settle the message. Celery calls it on the finisher's thread once the result is stored."""
        if self._dead_letter_reason is None:
            super().acknowledge()
        elif not self.acknowledged:
            self.acknowledged = True
            leases = self._message.channel.leases
            self.admission.settlement.call_soon(partial(leases.dead_letter, self.lease_id, *self._dead_letter_reason))

    def cost(self, usage: Usage | None) -> None:
        """Charge the tenant for these tokens, and count the request, when the message is settled. None: do neither."""
        tokens = 0 if usage is None else usage.prompt_tokens + usage.completion_tokens
        entry = None
        if usage is not None:
            kind: UsageKind = "embeddings" if self.task_name in TASK_OF else "completions"
            entry = UsageEntry(kind, key_name_of(self._request_dict.get("key_name")), usage)
        self._message.channel.leases.cost(self.lease_id, tokens, entry)

    def requeue(self, *, is_counted: bool = False, is_preempted: bool = False, choices: int | None = None) -> None:
        """Return the message to the front of its queue.

        With `is_counted` the delivery counts toward the limit, so that a message that cannot be served is not delivered
        for ever. It does not count if the worker chose to return it, as in a drain. `is_preempted` counts a preemption.
        `choices`, the number of the request's choices, is recorded in the queue.
        """
        self._settled()
        self._message.channel.leases.requeue(
            self.lease_id, is_counted=is_counted, is_preempted=is_preempted, choices=choices
        )
        self.send_event("task-rejected", requeue=True)

    def postpone(self, seconds: float, *, keeps_place: bool = False) -> None:
        """Return the message to the queue after `seconds`. No worker holds it until then.

        With `keeps_place` it keeps its place and its waiting time. Otherwise the delay ends at the message's ETA, and
        its waiting time begins then.
        """
        self._settled()
        self._message.channel.leases.postpone(self.lease_id, seconds, keeps_place=keeps_place)
        self.send_event("task-rejected", requeue=True)

    def dead_letter(self, reason: DeadLetterReason, detail: str = "") -> None:
        """Dead-letter the message now. The result of another message with the same id is kept."""
        self._settled()
        self._message.channel.leases.dead_letter(self.lease_id, reason, detail)
        self.send_event("task-rejected", requeue=False)

    def let_go(self) -> None:
        """Stop renewing the lease. The message is delivered again when the lease has expired."""
        self._settled()
        self._message.channel.leases.let_go(self.lease_id)

    def _settled(self) -> None:
        task_ready(self)
        self.acknowledged = True

    def terminate(self, pool: Any, signal: Any = None) -> None:  # noqa: ARG002  # Celery's signature
        """End the request. Celery calls it on a revoke with terminate=True."""
        self.admission.terminate(self.id)

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:  # noqa: ARG002
        """Announce nothing on Celery's cold shutdown: the worker's own step requeues the request."""
        self._already_cancelled = True

    def announce_terminated(self) -> None:
        """Store and announce that the request was revoked while it ran, and acknowledge its message."""
        self.call_back(_REVOKED)
        super()._announce_revoked("terminated", True, "SIGTERM", False)

    def announce_terminated_in_queue(self) -> None:
        """Do as `announce_terminated`, for a request that had not started."""
        self._announce_revoked("terminated", True, "SIGTERM", False)

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        """Let `Settlement` announce a revoked or expired request. Celery would do so on the event loop's thread."""
        self._already_revoked = True
        store = partial(super()._announce_revoked, reason, terminated, signum, expired)

        def announce() -> None:
            self.call_back(_EXPIRED if reason == "expired" else _REVOKED)
            store()

        self.admission.settlement.revoked_in_queue(self, reason, announce)


class ResultBackend:
    """Wraps Celery's backend so that it stores no failure.

    The task itself cannot fail. Celery treats a result that could not be stored as a failure, and would store that
    failure if Redis is back by then. But the message is delivered again, and then its result is stored.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def mark_as_failure(self, *_: Any, **__: Any) -> None:
        """Do nothing, for the reason in the class's docstring."""


class GenerateTask(Task):
    """Runs when the engine has completed the request, so that Celery stores the result and fires its signals."""

    name = TASK_NAME
    Strategy = "headrace_workers.celery.consumer:engine_strategy"
    Request = EngineRequest
    acks_late = True
    ignore_result = False
    track_started = False
    # Celery would write the beginning of the result, which is generated text, to log and events.
    resultrepr_maxsize = 0

    step: "EngineStep | None" = None
    """The step that runs the engine; None until the worker has made it."""

    def __init__(self, settings: "WorkerSettings") -> None:
        self.settings = settings

    def while_disconnected(self, seconds: float, problem: str | None = None) -> None:
        """Wait for `seconds` while there is no connection to Redis. `problem` is the reason."""
        if self.step is None:
            time.sleep(seconds)
        else:
            self.step.run_while_disconnected(seconds, problem)

    @property
    def backend(self) -> ResultBackend:
        return ResultBackend(super().backend)

    def run(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        return OUTCOME.get()


class EmbedTask(GenerateTask):
    """Computes embeddings."""

    name = "headrace.embed"


class ScoreTask(GenerateTask):
    """Scores pairs of texts."""

    name = "headrace.score"


class ClassifyTask(GenerateTask):
    """Classifies texts."""

    name = "headrace.classify"


class DecideTask(GenerateTask):
    """Answers questions about an input."""

    name = DECIDE_TASK


TASKS: Final = (GenerateTask, DecideTask, EmbedTask, ScoreTask, ClassifyTask)
"""Every worker registers all of them: it answers a task that its model does not serve with a refusal."""
