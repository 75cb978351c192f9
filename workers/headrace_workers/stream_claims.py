"""`StreamClaims`: claims the stream of a prepared request, and makes the job that resumes it."""

import time
from typing import Any

import structlog

from headrace_broker.model_identity import ModelIdentity
from headrace_broker.streams import Claim, StreamWriter, begun_with, draws_of
from headrace_engine.input_processor import ProcessedRequest
from headrace_monitoring.metrics import Metrics
from headrace_workers.celery_request import CeleryRequest
from headrace_workers.intake import Incoming, Prepared
from headrace_workers.job import Job, recorded_choices, recorded_prompt_logprobs
from headrace_workers.settlement import Settlement
from headrace_workers.tracing import RequestTracing

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)


class StreamClaims:
    """Claims streams for this worker. Runs on the thread of Celery's event loop only."""

    def __init__(
        self, writer: StreamWriter, settlement: Settlement, metrics: Metrics, tracing: RequestTracing, worker_name: str
    ) -> None:
        self._writer = writer
        self._settlement = settlement
        self._metrics = metrics
        self._tracing = tracing
        self._worker_name = worker_name

    def claim(
        self,
        incoming: Incoming,
        prepared: Prepared,
        celery_request: CeleryRequest,
        request: ProcessedRequest,
        model: ModelIdentity,
        draws: str,
    ) -> Job | None:
        """Make the request's job. If its stream had ended or is another message's, settle the request and return None.

        Args:
            model: the weights and adapter that compute the request.
            draws: name of the engine's draws.
        """
        started = time.perf_counter()
        span = self._tracing.begin(incoming, prepared)
        claim = self._writer.claim(
            incoming.request_id,
            self._worker_name,
            self._tracing.traceparent(span),
            incoming.abandon_after,
            content=celery_request.content,
            model=model,
            prompt_tokens=len(prepared.token_ids),
            prompt_tail=prepared.prompt_tail,
            draws=draws,
        )
        self._metrics.redis_command("claim", time.perf_counter() - started)
        if claim.has_replaced:
            logger.warning("deleted a stream that no worker can have written", request_id=incoming.request_id)
            self._metrics.stream_replaced()
        if claim.is_of_another_message:
            self._settlement.reject_duplicate(incoming.request_id, celery_request)
            return None
        if claim.ended is not None:
            self._settlement.finish_ended(celery_request, claim, claim.ended)
            return None
        return job_of(incoming, request, claim, celery_request, model, span, self._tracing.trace_id(span))


def job_of(
    incoming: Incoming,
    request: ProcessedRequest,
    claim: Claim,
    celery_request: CeleryRequest,
    model: ModelIdentity,
    span: Any,
    trace_id: str | None,
) -> Job:
    """Make the job of a claimed request, with the output of earlier attempts."""
    return Job(
        celery_request=celery_request,
        request=request,
        attempt=claim.attempt,
        choices=recorded_choices(claim.entries, request.params.n),
        prompt_logprobs=recorded_prompt_logprobs(claim.entries),
        queued_at=incoming.queued_at,
        tenant=incoming.tenant,
        abandon_after=incoming.abandon_after,
        span=span,
        trace_id=trace_id,
        model=model,
        begun_with=begun_with(claim.entries, model),
        drawn_with=draws_of(claim.entries),
        engine_losses=claim.engine_losses,
        step=incoming.step,
        preemptions=incoming.preemptions,
    )
