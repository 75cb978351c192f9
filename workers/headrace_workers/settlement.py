"""`Settlement`: how a request ends. Its stream gets an end, its result is stored, its message acknowledged.

In that order, so that whoever sees a result finds a whole stream, and a worker that dies in between leaves a message
whose next delivery is answered from its stream. Everything here is called on the thread of Celery's event loop; only
the end-of-task work of a request goes to the finisher's thread.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog
from celery.worker.state import task_ready

from headrace_broker.connections import REDIS_ERRORS
from headrace_broker.dead_letters import DUPLICATE, DeadLetter
from headrace_broker.results import ErrorInfo, GenerateResult
from headrace_broker.streams import Attempt, Claim, StreamWrite, StreamWriter, WriteOutcome
from headrace_monitoring.labels import Outcome
from headrace_monitoring.metrics import SERVED, Metrics
from headrace_workers.finisher import Finisher
from headrace_workers.intake import MALFORMED, Incoming, tenant_of
from headrace_workers.job import Job, recorded_result
from headrace_workers.publisher import Publisher
from headrace_workers.tracing import RequestTracing

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)

RunTask = Callable[[dict[str, Any]], None]

_MALFORMED = ErrorInfo("invalid_request", MALFORMED)
_CANCELLED = ErrorInfo("cancelled", "the request was cancelled")
_EXPIRED = ErrorInfo("expired", "the deadline passed before the request was complete")
_GONE = ErrorInfo("expired", "the stream has expired or was deleted")


class Settlement:
    """Owns what this worker still has to tell Redis about requests that are, or are about to be, over.

    Args:
        store_result: stores a request's result where no Celery request is at hand; called on the finisher's thread.
    """

    def __init__(
        self,
        writer: StreamWriter,
        metrics: Metrics,
        store_result: Callable[[str, dict[str, Any]], None],
        tracing: RequestTracing,
    ) -> None:
        self._writer = writer
        self._metrics = metrics
        self._tracing = tracing
        self._store_result = store_result
        self._publisher = Publisher(writer, metrics)
        self._finisher = Finisher()
        self._ending: dict[Attempt, tuple[Job, GenerateResult, Outcome]] = {}
        """Complete, but the end of the stream is not in Redis yet."""
        self._hub: Any = None

    def attach(self, hub: Any) -> None:
        """The event loop; again after each reconnect."""
        self._hub = hub

    def call_soon(self, callback: Callable[[], object]) -> None:
        """On the event loop's thread, from any other."""
        self._hub.call_soon(callback)

    @property
    def is_idle(self) -> bool:
        """Nothing to write, nothing to store, nothing to acknowledge."""
        return not (self._ending or len(self._publisher) or self._finisher.busy)

    @property
    def waits_for_redis(self) -> bool:
        """Redis has not taken the last write."""
        return self._publisher.is_refused

    def stop(self) -> None:
        self._finisher.stop()

    # -- requests that this worker holds --------------------------------------------------------------------------

    def publish(self, chunk: StreamWrite) -> None:
        """Write it with the next `flush`."""
        self._publisher.add(chunk)

    def forget(self, job: Job) -> None:
        """Write nothing more of a job that is no longer ours."""
        self._publisher.drop(job.key)

    def ending(self, request_id: str) -> Job | None:
        """The job of that request, where it is complete and only its end is not written yet."""
        return next((job for job, _, _ in self._ending.values() if job.request_id == request_id), None)

    def complete(self, job: Job, finish_reason: Outcome, error: ErrorInfo | None = None) -> None:
        """The job is over: end its stream, and once that is written, store and acknowledge."""
        self._publisher.add(job.end(finish_reason, error))
        self._ending[job.key] = (job, job.result(error), finish_reason)

    def expire(self, job: Job) -> None:
        """As `complete`, for a job whose deadline has passed."""
        self.complete(job, "expired", _EXPIRED)

    def abandon(self, job: Job) -> None:
        """As `complete`, for a job to which nobody listens."""
        logger.info("nobody listens", **job.log_fields)
        message = f"nobody has listened for {job.abandon_after:g} s"
        self.complete(job, "cancelled", ErrorInfo("cancelled", message))

    def revoke(self, job: Job) -> None:
        """Celery revoked a running job: its result is Celery's own."""
        self._publisher.add(job.end("cancelled", _CANCELLED))
        self._finish_job(job, "cancelled", job.celery_request.announce_terminated)

    def flush(self, *, retry: bool = False) -> dict[Attempt, WriteOutcome]:
        """Write what is to be written, and settle the jobs whose end has been written or refused.

        Returns the other attempts of which something was refused: whoever runs them is to stop and call `refused`.
        After a failure nothing is written until a `retry`.
        """
        refused = self._publisher.flush(retry=retry)
        if refused is None:
            return {}  # Redis is away: the heartbeat tries again
        complete, self._ending = self._ending, {}
        for key, (job, result, finish_reason) in complete.items():
            if key in refused:
                self.refused(job, refused.pop(key))
            else:
                self._finish_job(job, finish_reason, partial(job.run_task, result.to_wire()))
        return refused

    def refused(self, job: Job, outcome: WriteOutcome) -> None:
        """The stream takes nothing more from this job."""
        logger.info("stream refused a chunk", **job.log_fields, outcome=outcome.value)
        if outcome is WriteOutcome.FENCED:
            # Another worker has it under a message of its own; where this lease is lost too, the ack does nothing.
            self._metrics.request_handed_back()
            self._tracing.end(job, None)
            task_ready(job.celery_request)
            job.celery_request.cost(0)  # the other message pays
            job.celery_request.acknowledge()
            return
        if outcome is WriteOutcome.ROLLED_BACK:
            # more is lost than was kept here: the next attempt generates it again, from what the stream still holds
            self.forget(job)
            self._metrics.request_handed_back()
            self._tracing.end(job, None)
            job.celery_request.hand_back()
            return
        gone = outcome is WriteOutcome.GONE
        result = job.result(_GONE if gone else _CANCELLED)
        self._finish_job(job, "expired" if gone else "cancelled", partial(job.run_task, result.to_wire()))

    # -- requests that never ran here -----------------------------------------------------------------------------

    def finish_ended(self, request_id: str, claim: Claim, celery_request: Any, run_task: RunTask) -> None:
        """The stream says that the request is over; only the result or the acknowledgement is missing."""
        assert claim.ended is not None
        logger.info(
            "request had ended already",
            request_id=request_id,
            attempt=claim.attempt,
            finish_reason=claim.ended.finish_reason,
        )
        if claim.ended.finish_reason == "cancelled":
            self._metrics.request_refused("cancelled", tenant_of(celery_request))
        result = recorded_result(request_id, claim.entries, claim.ended)
        usage = claim.ended.usage
        celery_request.cost(0 if usage is None else usage.prompt_tokens + usage.completion_tokens)
        self._finish(celery_request, partial(run_task, result.to_wire()))

    def refuse(self, incoming: Incoming, error: ErrorInfo, celery_request: Any, run_task: RunTask) -> None:
        """Answer a request that cannot be served: an end in its stream, an error in its result."""
        logger.info("request refused", request_id=incoming.request_id, code=error.code)
        self._metrics.request_refused("rejected", incoming.tenant)
        self.end_stream(incoming.request_id, "rejected", error)
        result = GenerateResult(incoming.request_id, [], None, error).to_wire()
        celery_request.cost(0)
        self._finish(celery_request, partial(run_task, result))

    def refuse_malformed(self, request_id: str) -> None:
        """Answer a message that Celery could not even read; the consumer rejects the message itself."""
        self._metrics.request_refused("rejected")
        if self.end_stream(request_id, "rejected", _MALFORMED):
            self._store_error(request_id, _MALFORMED)

    def dead_letter(self, letter: DeadLetter) -> None:
        """A message will not be delivered again: tell whoever waits for its stream or its result."""
        self._metrics.dead_lettered(letter.reason)
        if letter.request_id is None or letter.reason == DUPLICATE:
            return
        after = f"after {letter.deliveries} deliveries" if letter.deliveries else "before its first delivery"
        error = ErrorInfo("dead_letter", f"given up {after}: {letter.reason}")
        if self.end_stream(letter.request_id, "error", error):
            self._store_error(letter.request_id, error)

    def revoked_in_queue(self, celery_request: Any, reason: str, announce: Callable[[], None]) -> None:
        """Celery dropped a request before it began: it was revoked, or its deadline had passed."""
        expired = reason == "expired"
        self._metrics.request_refused("expired" if expired else "cancelled", tenant_of(celery_request))
        self.end_stream(celery_request.id, "expired" if expired else "cancelled", _EXPIRED if expired else _CANCELLED)
        celery_request.cost(0)
        self._finish(celery_request, announce)

    def end_stream(self, request_id: str, finish_reason: str, error: ErrorInfo) -> bool:
        """End the stream of a request that this worker does not hold; False where it had ended, or Redis refuses."""
        try:
            return self._writer.end_unclaimed(request_id, finish_reason, error)
        except (*REDIS_ERRORS, UnicodeError) as failure:  # an id of a malformed message may be no text at all
            logger.warning("stream could not be ended", error=type(failure).__name__)
            return False

    def _store_error(self, request_id: str, error: ErrorInfo) -> None:
        result = GenerateResult(request_id, [], None, error).to_wire()
        self._finisher.submit(
            partial(self._store_result, request_id, result), on_failure=lambda: None, request_id=request_id
        )

    def _finish(self, celery_request: Any, finish: Callable[[], None], **about: Any) -> None:
        """Store, announce and acknowledge; a message whose result cannot be stored is delivered again."""
        self._finisher.submit(
            finish,
            on_failure=partial(self._hub.call_soon, celery_request.let_go),
            request_id=celery_request.id,
            **about,
        )

    def _finish_job(self, job: Job, outcome: Outcome, finish: Callable[[], None]) -> None:
        self._finish_metrics(job, outcome)
        job.celery_request.cost(len(job.request.prompt_token_ids) + job.num_tokens)
        self._finish(job.celery_request, finish, attempt=job.attempt)

    def _finish_metrics(self, job: Job, outcome: Outcome) -> None:
        self._tracing.end(job, outcome, None if outcome in SERVED else outcome)
        waited = 0.0 if job.enqueued_at is None else time.time() - job.enqueued_at
        self._metrics.request_finished(
            outcome,
            max(waited, time.monotonic() - job.received_at),
            len(job.request.prompt_token_ids),
            job.num_cached_tokens,
            job.num_tokens,
            tenant=job.tenant,
            decode_seconds=job.decode_seconds,
            decoded_tokens=job.num_tokens - job.num_first_tokens,
            trace_id=job.trace_id,
        )
