"""`Settlement`: how a request ends. Its stream gets an end, its result is stored, its message acknowledged.

In that order, so that whoever sees a result finds a whole stream, and a worker that dies in between leaves a message
whose next delivery is answered from its stream. Everything here is called on the thread of Celery's event loop; only
the end-of-task work of a request goes to the finisher's thread.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import redis
import structlog

from headrace_broker.connections import REDIS_ERRORS
from headrace_broker.content import answer_type
from headrace_broker.dead_letters import DeadLetter
from headrace_broker.errors import MalformedEntryError
from headrace_broker.events import EndEvent, StreamEvent
from headrace_broker.reasons import ErrorCode
from headrace_broker.results import ErrorInfo, GenerateResult, Usage
from headrace_broker.streams import Attempt, Claim, Ending, StreamWrite, StreamWriter, WriteOutcome
from headrace_monitoring.labels import Outcome
from headrace_monitoring.metrics import SERVED, Metrics
from headrace_workers.finisher import Finisher
from headrace_workers.intake import MALFORMED, Incoming, tenant_of
from headrace_workers.job import Job, recorded_result, recorded_usage
from headrace_workers.publisher import Publisher
from headrace_workers.tracing import RequestTracing

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)

RunTask = Callable[[dict[str, Any]], None]
StoreResult = Callable[[str, dict[str, Any], str], None]

_CANCELLED = ErrorInfo(ErrorCode.CANCELLED, "the request was cancelled")
_EXPIRED = ErrorInfo(ErrorCode.EXPIRED, "the deadline passed before the request was complete")
_GONE = ErrorInfo(ErrorCode.EXPIRED, "the stream has expired or was deleted")


class Settlement:
    """Owns what this worker still has to tell Redis about requests that are, or are about to be, over.

    Args:
        store_result: stores a request's result, in the content type that comes last, where no Celery request is at
            hand; called on the finisher's thread.
    """

    def __init__(
        self,
        writer: StreamWriter,
        metrics: Metrics,
        store_result: StoreResult,
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
        self.redis_refuses = False
        """Redis failed a request's stream; nothing more is to be taken until somebody resets this."""

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

    def hand_back(self, job: Job, reason: str, *, strike: bool = False, is_preempted: bool = False) -> None:
        """Put a job's message back into the queue; its stream waits there with it."""
        if not self.waits_for_redis:
            try:
                self._writer.keep(job.request_id)
            except REDIS_ERRORS as failure:
                logger.warning("stream may expire in the queue", **job.log_fields, error=type(failure).__name__)
        self._metrics.message_returned(reason)
        job.celery_request.hand_back(strike=strike, is_preempted=is_preempted)

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
        self.complete(job, "cancelled", ErrorInfo(ErrorCode.CANCELLED, message))

    def end_of_other_model(self, job: Job) -> None:
        """As `complete`, for a job that this worker's model must not continue: it would be another's answer."""
        logger.warning("model changed", **job.log_fields, begun_with=str(job.begun_with), serves=str(job.model))
        message = (
            f"the request was begun with {job.begun_with}, and this worker serves {job.model}: its tokens so far are"
            " kept, and another model must not continue them; send it again under a new id"
        )
        self.complete(job, "error", ErrorInfo(ErrorCode.MODEL_CHANGED, message))

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
        if outcome in (WriteOutcome.FENCED, WriteOutcome.ROLLED_BACK):
            # Fenced: another worker has the request, and this lease is lost: then handing back does nothing. Or
            # somebody else wrote to the stream: then the next claim sees what is there. Rolled back: more is lost than
            # was kept here, and the next attempt generates it again. Whose doing it is cannot be told, so it counts.
            self.forget(job)
            self._metrics.request_handed_back()
            self._tracing.end(job, None)
            self.hand_back(job, outcome.value, strike=True)
            return
        gone = outcome is WriteOutcome.GONE
        if gone:
            self._stream_is_gone(job)
        result = job.result(_GONE if gone else _CANCELLED)
        self._finish_job(job, "expired" if gone else "cancelled", partial(job.run_task, result.to_wire()))

    def _stream_is_gone(self, job: Job) -> None:
        """Somebody deleted the stream, or the server lost it: a subscriber that comes later must not wait for it."""
        logger.warning("stream was deleted under a running request", **job.log_fields)
        self._metrics.stream_gone()
        try:
            self._writer.mark_gone(job.request_id)
        except REDIS_ERRORS as failure:
            logger.warning("stream's end could not be marked", **job.log_fields, error=type(failure).__name__)

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
        celery_request.cost(_tokens_of(claim.ended.usage or recorded_usage(claim.entries)))
        self._finish(celery_request, partial(run_task, result.to_wire()))

    def refuse(self, incoming: Incoming, error: ErrorInfo, celery_request: Any, run_task: RunTask) -> None:
        """Answer a request that cannot be served: an end in its stream, an error in its result."""
        logger.info("request refused", request_id=incoming.request_id, code=error.code)
        if not self._end_stream_of(celery_request, "rejected", error):
            return
        self._metrics.request_refused("rejected", incoming.tenant)
        result = GenerateResult(incoming.request_id, [], None, error).to_wire()
        self._finish(celery_request, partial(run_task, result))

    def set_aside(self, request_id: str, celery_request: Any) -> None:
        """The request id is another message's: this one becomes a dead letter, and changes nothing of the other's."""
        logger.warning("request id is another message's", request_id=request_id)
        celery_request.set_aside()

    def give_back(self, celery_request: Any, error: Exception) -> None:
        """Redis refused a request's stream. Where it takes other writes, that counts against the request."""
        is_own = isinstance(error, redis.ResponseError) and self._writer.takes_writes()
        logger.warning("request goes back to the queue", request_id=celery_request.id, error=str(error))
        self._metrics.message_returned("stream_refused" if is_own else "redis")
        celery_request.hand_back(strike=is_own)
        self.redis_refuses = self.redis_refuses or not is_own

    def refuse_malformed(
        self, request_id: str, content: str, why: str = MALFORMED, content_type: object = None
    ) -> None:
        """Answer a message that Celery could not even read; the consumer rejects the message itself."""
        self._metrics.request_refused("rejected")
        error = ErrorInfo(ErrorCode.INVALID_REQUEST, why)
        self._end_stream(request_id, "rejected", error, content, answer_type(content_type))

    def dead_letter(self, letter: DeadLetter) -> None:
        """A message will not be delivered again: tell whoever waits for its stream or its result."""
        self._metrics.dead_lettered(letter.reason)
        if letter.answered_id is not None:
            self._end_stream(letter.answered_id, "error", letter.error, letter.content, letter.content_type)

    def revoked_in_queue(self, celery_request: Any, reason: str, announce: Callable[[], None]) -> None:
        """Celery dropped a request before it began: it was revoked, or its deadline had passed."""
        outcome: Outcome = "expired" if reason == "expired" else "cancelled"
        if not self._end_stream_of(celery_request, outcome, _EXPIRED if outcome == "expired" else _CANCELLED):
            return
        self._metrics.request_refused(outcome, tenant_of(celery_request))
        self._finish(celery_request, announce)

    def _end_stream_of(self, celery_request: Any, finish_reason: str, error: ErrorInfo) -> bool:
        """End the stream of a request that this worker does not run; its tenant pays for the tokens that it has.

        False where the end is not to be answered with `error`, and its message is settled here: the stream had ended,
        is another message's, or Redis refuses.
        """
        request_id = celery_request.id
        try:
            ending = self._writer.end_unclaimed(request_id, finish_reason, error, celery_request.content)
            entries = [] if ending is Ending.ANOTHERS else self._writer.recorded(request_id)
        except MalformedEntryError:
            entries = []
        except REDIS_ERRORS as failure:
            self.give_back(celery_request, failure)
            return False
        if ending is Ending.ANOTHERS:
            self.set_aside(request_id, celery_request)
        elif ending is Ending.HAD_ENDED:
            self._finish_recorded(celery_request, entries)
        else:
            celery_request.cost(_tokens_of(recorded_usage(entries)))
        return ending is Ending.WRITTEN

    def _finish_recorded(self, celery_request: Any, entries: Sequence[StreamEvent]) -> None:
        """The stream of a request that is not to run had ended: its result is what the stream says."""
        ended = entries[-1] if entries else None
        if not isinstance(ended, EndEvent):  # it has expired in this moment
            self._metrics.message_returned("stream_refused")
            celery_request.hand_back(strike=True)
            return
        result = recorded_result(celery_request.id, entries, ended).to_wire()
        celery_request.cost(_tokens_of(ended.usage or recorded_usage(entries)))

        def finish() -> None:
            self._store_result(celery_request.id, result, celery_request.content_type)
            celery_request.on_success((False, "", 0.0))

        self._finish(celery_request, finish)

    def _end_stream(
        self, request_id: str, finish_reason: str, error: ErrorInfo, content: str, content_type: str
    ) -> None:
        """End the stream of a message that Celery does not know, and store its result, unless it had ended."""
        try:
            ending = self._writer.end_unclaimed(request_id, finish_reason, error, content)
        except (*REDIS_ERRORS, UnicodeError) as failure:  # an id of a malformed message may be no text at all
            logger.warning("stream could not be ended", error=type(failure).__name__)
            return
        if ending is Ending.WRITTEN:
            self._store_error(request_id, error, content_type)

    def _store_error(self, request_id: str, error: ErrorInfo, content_type: str) -> None:
        result = GenerateResult(request_id, [], None, error).to_wire()
        self._finisher.submit(
            partial(self._store_result, request_id, result, content_type),
            on_failure=lambda: None,
            request_id=request_id,
        )

    def _finish(self, celery_request: Any, finish: Callable[[], None], **about: Any) -> None:
        """Store, announce and acknowledge; a message whose result cannot be stored is delivered again."""

        def let_go() -> None:
            self._metrics.message_returned("result_not_stored")
            celery_request.let_go()

        self._finisher.submit(
            finish,
            on_failure=partial(self._hub.call_soon, let_go),
            request_id=celery_request.id,
            **about,
        )

    def _finish_job(self, job: Job, outcome: Outcome, finish: Callable[[], None]) -> None:
        self._finish_metrics(job, outcome)
        job.celery_request.cost(len(job.request.prompt_token_ids) + job.num_tokens)
        self._finish(job.celery_request, finish, attempt=job.attempt)

    def _finish_metrics(self, job: Job, outcome: Outcome) -> None:
        self._tracing.end(job, outcome, None if outcome in SERVED else outcome)
        self._metrics.request_finished(
            outcome,
            time.monotonic() - min(job.received_at, job.received_at if job.queued_at is None else job.queued_at),
            len(job.request.prompt_token_ids),
            job.num_cached_tokens,
            job.num_tokens,
            tenant=job.tenant,
            decode_seconds=job.decode_seconds,
            decoded_tokens=job.num_tokens - job.num_first_tokens,
            trace_id=job.trace_id,
        )


def _tokens_of(usage: Usage | None) -> int:
    return 0 if usage is None else usage.prompt_tokens + usage.completion_tokens
