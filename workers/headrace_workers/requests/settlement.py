"""`Settlement`: ends a request. It ends the stream, then stores the result, then acknowledges the message.

Because of this order, a client that sees a result finds a complete stream. If a worker dies in between, the next
delivery of the message is answered from its stream. All methods are called on the thread of Celery's event loop. Only
the end-of-task work of a request runs on the finisher's thread.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import structlog

from headrace_broker.content import answer_type
from headrace_broker.errors import MalformedEntryError
from headrace_broker.queue.dead_letters import DeadLetter
from headrace_broker.queue.worker_port import DeliveryInfo
from headrace_broker.results import ErrorInfo
from headrace_broker.server.connections import REDIS_ERRORS, is_fault_of_server
from headrace_broker.server.stream_table import MAIN
from headrace_broker.streams.events import EndEvent, StreamEvent
from headrace_broker.streams.writer import Ending, StreamClaim
from headrace_monitoring.metrics import SERVED, Metrics
from headrace_wire.codes import DeadLetterReason, ErrorCode, FinishReason
from headrace_workers.preparation.celery_request import CeleryRequest
from headrace_workers.preparation.intake import MALFORMED, Incoming, tenant_of
from headrace_workers.requests.finisher import Finisher
from headrace_workers.requests.job import Job, Result
from headrace_workers.requests.recorded_answers import failed_answer, recorded_answer, recorded_usage
from headrace_workers.requests.stream_homes import StreamHomes
from headrace_workers.requests.tracing import RequestTracing

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)

StoreResult = Callable[[str, dict[str, Any], str], None]

CANCELLED = ErrorInfo(ErrorCode.CANCELLED, "the request was cancelled")
EXPIRED = ErrorInfo(ErrorCode.EXPIRED, "the deadline passed before the request was complete")
_GONE = ErrorInfo(ErrorCode.EXPIRED, "the stream has expired or was deleted")


class Settlement:
    """Finishes requests. It ends the streams of requests that never ran here; `in_flight.py` ends those of the others.

    Args:
        store_result: stores a result without Celery's task. Takes request id, result and content type; called on the
            finisher's thread.
        on_refused: called with the reason when Redis refuses a write of the worker.
        call_back_dead: sends the errbacks of a dead letter; called on the finisher's thread.
    """

    def __init__(
        self,
        homes: StreamHomes,
        metrics: Metrics,
        store_result: StoreResult,
        tracing: RequestTracing,
        on_refused: Callable[[str], None],
        call_back_dead: Callable[[DeadLetter], None] = lambda _letter: None,
    ) -> None:
        self._homes = homes
        self._metrics = metrics
        self._tracing = tracing
        self._store_result = store_result
        self._call_back_dead = call_back_dead
        self._finisher = Finisher()
        self._hub: Any = None
        self._unended: dict[str, Callable[[], None]] = {}
        """By request id: a function that ends a stream whose end Redis has refused. The heartbeat calls it again."""
        self.redis_refuses = False
        """Whether Redis failed on a request's stream or result. If so, take no messages until the next heartbeat."""
        self.on_refused = on_refused

    def attach(self, hub: Any) -> None:
        """Run in this event loop; called again after each reconnect."""
        self._hub = hub

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call `callback` on the event loop's thread. Any thread may use this method."""
        self._hub.call_soon(callback)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to end, to store or to acknowledge."""
        return not (self._finisher.busy or self._unended)

    def heartbeat(self) -> None:
        """Let the worker try Redis again, and end the streams whose end was refused. Call it once a second."""
        self.redis_refuses = False
        for end in list(self._unended.values()):
            end()
            if self.redis_refuses:
                return

    def stop(self) -> None:
        self._finisher.stop()

    # -- requests that ran here ------------------------------------------------------------------------------------

    def finish(self, job: Job, outcome: FinishReason, result: Result) -> None:
        """Store and announce the result of a job whose stream has ended, and acknowledge its message."""
        self._finish_job(job, outcome, partial(job.celery_request.finish, result.to_wire()))

    def finish_revoked(self, job: Job) -> None:
        """Do as `finish`, for a job that Celery has revoked. Celery stores its own result."""
        self._finish_job(job, "cancelled", job.celery_request.announce_terminated)

    def finish_refused(self, job: Job, *, is_gone: bool) -> None:
        """Do as `finish`, for a job whose stream a client has ended, or whose stream is gone."""
        if not is_gone:
            self.finish(job, "cancelled", job.result(CANCELLED))
            return
        logger.warning("stream deleted under a running request", **job.log_fields)
        self._metrics.stream_gone()
        try:
            with self._homes.writing(job.home) as writer:
                writer.mark_gone(job.request_id)  # so that a later subscriber does not wait for it
        except REDIS_ERRORS as failure:
            logger.warning("stream not marked as gone", **job.log_fields, error=type(failure).__name__)
        self.finish(job, "expired", job.result(_GONE))

    # -- requests that never ran here -----------------------------------------------------------------------------

    def finish_ended(self, celery_request: CeleryRequest, claim: StreamClaim, ended: EndEvent) -> None:
        """Finish a request whose stream has ended, but whose result or acknowledgement is missing."""
        logger.info(
            "request had ended already",
            request_id=celery_request.id,
            attempt=claim.attempt,
            finish_reason=ended.finish_reason,
        )
        if ended.finish_reason == "cancelled":
            self._metrics.request_refused("cancelled", tenant_of(celery_request))
        result = recorded_answer(celery_request.task_name, celery_request.id, claim.entries, ended)
        celery_request.cost(ended.usage or recorded_usage(claim.entries))
        self._finish(celery_request, partial(celery_request.finish, result))

    def refuse(self, incoming: Incoming, error: ErrorInfo, celery_request: CeleryRequest) -> None:
        """Answer a request that cannot be served with an error in its stream and in its result."""
        logger.info("request refused", request_id=incoming.request_id, code=error.code)
        if not self._end_stream_of(celery_request, "rejected", error):
            return
        self._metrics.request_refused("rejected", incoming.tenant)
        result = failed_answer(celery_request.task_name, incoming.request_id, error)
        self._finish(celery_request, partial(celery_request.finish, result))

    def finish_lost(self, celery_request: CeleryRequest) -> None:
        """End a request whose stream has been lost with its server. Its tokens must not be generated again unseen."""
        lost = celery_request.delivery.lost
        logger.warning("stream lost", request_id=celery_request.id, stream_server=lost)
        message = f"the stream server {lost} lost the request's stream: send the request again under a new id"
        error = ErrorInfo(ErrorCode.STREAM_LOST, message)
        if not self._end_stream_of(celery_request, "error", error):
            return
        self._metrics.request_refused("error", tenant_of(celery_request))
        result = failed_answer(celery_request.task_name, celery_request.id, error)
        self._finish(celery_request, partial(celery_request.finish, result))

    def reject_duplicate(self, request_id: str, celery_request: CeleryRequest) -> None:
        """Dead-letter a message whose request id belongs to another message. The other one is not affected."""
        logger.warning("request id belongs to another message", request_id=request_id)
        celery_request.dead_letter(DeadLetterReason.DUPLICATE_ID)

    def return_to_queue(self, celery_request: CeleryRequest, error: Exception) -> None:
        """Return a request whose stream Redis refused. The delivery counts unless the server is at fault.

        A request whose stream server is away keeps its place, and the worker continues with other requests.
        """
        home = self._home_of(celery_request)
        is_own = not self._is_fault_of(home, error)
        if home != MAIN and not is_own:
            delay = self._homes.delay(home)
            logger.warning("request postponed", request_id=celery_request.id, seconds=delay, error=str(error))
            self._metrics.message_returned("redis")
            celery_request.postpone(delay, keeps_place=True)
            return
        self._requeue(celery_request, error, is_own=is_own)

    def _home_of(self, celery_request: CeleryRequest) -> str:
        return self._homes.servers.home_at(celery_request.delivery.home, celery_request.id)

    def _is_fault_of(self, home: str, error: Exception) -> bool:
        """Return whether Redis refused a stream for another reason than that stream."""
        if self._homes.is_away(home) or is_fault_of_server(error):
            self._homes.failed(home, error)
            return True
        return not self._homes.writer(home).takes_writes()

    def _requeue(self, celery_request: CeleryRequest, error: Exception, *, is_own: bool) -> None:
        logger.warning("request returned to the queue", request_id=celery_request.id, error=str(error))
        self._metrics.message_returned("stream_refused" if is_own else "redis")
        celery_request.requeue(is_counted=is_own)
        if not is_own:
            self._pause(error)

    def _pause(self, error: Exception) -> None:
        """Take no messages until the next heartbeat, as Redis refuses to serve."""
        self.redis_refuses = True
        self.on_refused(str(error))

    def refuse_malformed(
        self, request_id: str, delivery: DeliveryInfo, why: str = MALFORMED, content_type: object = None
    ) -> None:
        """Answer a message that Celery could not read. The consumer rejects the message."""
        self._metrics.request_refused("rejected")
        error = ErrorInfo(ErrorCode.INVALID_REQUEST, why)
        self._end_stream(request_id, delivery.home, "rejected", error, delivery.content, answer_type(content_type))

    def dead_letter(self, letter: DeadLetter) -> None:
        """Answer a message that became a dead letter, for clients that wait for its stream or result."""
        self._metrics.dead_lettered(letter.reason)
        if letter.answered_id is not None:
            about = (letter.error, letter.content, letter.content_type)
            self._end_stream(letter.answered_id, letter.home, "error", *about)
            self._finisher.submit(
                partial(self._call_back_dead, letter),
                on_failure=lambda error: logger.error(
                    "errbacks of a dead letter lost", request_id=letter.answered_id, error=str(error)
                ),
                request_id=letter.answered_id,
            )

    def revoked_in_queue(self, celery_request: CeleryRequest, reason: str, announce: Callable[[], None]) -> None:
        """Finish a request that Celery dropped before it began: it was revoked, or its deadline had passed."""
        outcome: FinishReason = "expired" if reason == "expired" else "cancelled"
        if not self._end_stream_of(celery_request, outcome, EXPIRED if outcome == "expired" else CANCELLED):
            return
        self._metrics.request_refused(outcome, tenant_of(celery_request))
        self._finish(celery_request, announce)

    def _end_stream_of(self, celery_request: CeleryRequest, finish_reason: str, error: ErrorInfo) -> bool:
        """End the stream of a request that this worker does not run, and charge its tenant for the tokens it has.

        Returns False, with the message settled, if the caller must not answer: the stream had ended, belongs to
        another message, or Redis refuses it.
        """
        request_id, delivery = celery_request.id, celery_request.delivery
        try:
            with self._homes.writing(self._home_of(celery_request)) as writer:
                lease = delivery.grant.number if delivery.grant is not None else 0
                ending = writer.end_unclaimed(request_id, finish_reason, error, delivery.content, lease)
                entries = [] if ending is Ending.OF_ANOTHER_MESSAGE else writer.recorded(request_id)
        except MalformedEntryError:
            entries = []
        except REDIS_ERRORS as failure:
            self.return_to_queue(celery_request, failure)
            return False
        if ending is Ending.OF_ANOTHER_MESSAGE:
            self.reject_duplicate(request_id, celery_request)
        elif ending is Ending.HAD_ENDED:
            self._finish_recorded(celery_request, entries)
        else:
            celery_request.cost(recorded_usage(entries))
        return ending is Ending.WRITTEN

    def _finish_recorded(self, celery_request: CeleryRequest, entries: Sequence[StreamEvent]) -> None:
        """Finish a request with the result from its stream, which ended before the request could run."""
        ended = entries[-1] if entries else None
        if not isinstance(ended, EndEvent):  # the stream has just expired
            self._metrics.message_returned("stream_refused")
            celery_request.requeue(is_counted=True)
            return
        result = recorded_answer(celery_request.task_name, celery_request.id, entries, ended)
        celery_request.cost(ended.usage or recorded_usage(entries))

        def finish() -> None:
            self._store_result(celery_request.id, result, celery_request.content_type)
            celery_request.call_back(result)
            celery_request.on_success((False, "", 0.0))

        self._finish(celery_request, finish)

    def _end_stream(
        self, request_id: str, home: str, finish_reason: str, error: ErrorInfo, content: str, content_type: str
    ) -> None:
        """End the stream of a message that Celery does not know, and store the result. Do neither if it had ended."""
        home = self._homes.servers.home_at(home, request_id)
        try:
            with self._homes.writing(home) as writer:
                ending = writer.end_unclaimed(request_id, finish_reason, error, content)
        except (*REDIS_ERRORS, UnicodeError) as failure:  # the id of a malformed message may be invalid Unicode
            logger.warning("stream not ended", error=type(failure).__name__)
            if not isinstance(failure, UnicodeError) and self._is_fault_of(home, failure):
                self._unended[request_id] = partial(
                    self._end_stream, request_id, home, finish_reason, error, content, content_type
                )
                if home == MAIN:
                    self._pause(failure)
                return
            ending = Ending.HAD_ENDED
        self._unended.pop(request_id, None)
        if ending is Ending.WRITTEN:
            result = failed_answer(None, request_id, error)
            store = partial(self._store_result, request_id, result, content_type)
            self._finisher.submit(store, on_failure=lambda _error: None, request_id=request_id)

    def _finish(self, celery_request: CeleryRequest, finish: Callable[[], None], **about: Any) -> None:
        """Store and announce the result, and acknowledge. If it cannot be stored, the message is delivered again."""

        def not_stored(error: Exception) -> None:
            if isinstance(error, REDIS_ERRORS) and is_fault_of_server(error):
                self._requeue(celery_request, error, is_own=False)
                return
            self._metrics.message_returned("result_not_stored")
            celery_request.let_go()

        def on_failure(error: Exception) -> None:
            self.call_soon(partial(not_stored, error))

        self._finisher.submit(finish, on_failure, request_id=celery_request.id, **about)

    def _finish_job(self, job: Job, outcome: FinishReason, finish: Callable[[], None]) -> None:
        self._tracing.end(job, outcome, None if outcome in SERVED else outcome)
        usage = job.usage()
        self._metrics.request_finished(
            outcome,
            time.monotonic() - min(job.received_at, job.received_at if job.queued_at is None else job.queued_at),
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            tenant=job.tenant,
            decode_seconds=job.decode_seconds,
            decoded_tokens=job.num_decoded_tokens,
            trace_id=job.trace_id,
        )
        job.celery_request.cost(usage)
        self._finish(job.celery_request, finish, attempt=job.attempt)
