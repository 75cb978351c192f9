"""The streams of this worker's requests: their claim and their subscribers. `publisher.py` writes their chunks."""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import structlog

from headrace_broker.models.identity import ModelIdentity
from headrace_broker.server.connections import REDIS_ERRORS
from headrace_broker.streams.grant import Grant
from headrace_broker.streams.listeners import Listeners
from headrace_broker.streams.writer import StreamClaim, begun_with, draws_of
from headrace_engine.api.input_processor import ProcessedRequest
from headrace_engine.requests.pooling_request import PoolingCoreRequest
from headrace_monitoring.metrics import Metrics
from headrace_workers.preparation.celery_request import CeleryRequest
from headrace_workers.preparation.decision_intake import PreparedDecision
from headrace_workers.preparation.intake import Incoming
from headrace_workers.preparation.plain_requests import AnyPrepared
from headrace_workers.preparation.pooling_intake import PreparedInputs
from headrace_workers.requests.decide_job import DecideJob, recorded_readings
from headrace_workers.requests.generate_job import GenerateJob, recorded_choices, recorded_prompt_logprobs
from headrace_workers.requests.job import Job
from headrace_workers.requests.pooling_job import PoolingJob
from headrace_workers.requests.settlement import Settlement
from headrace_workers.requests.stream_homes import StreamHomes
from headrace_workers.requests.tracing import RequestTracing

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)


class StreamClaims:
    """Claims streams for this worker. Runs on the thread of Celery's event loop only."""

    def __init__(
        self, homes: StreamHomes, settlement: Settlement, metrics: Metrics, tracing: RequestTracing, worker_name: str
    ) -> None:
        self._homes = homes
        self._settlement = settlement
        self._metrics = metrics
        self._tracing = tracing
        self._worker_name = worker_name

    def claim(
        self,
        incoming: Incoming,
        prepared: AnyPrepared,
        celery_request: CeleryRequest,
        request: ProcessedRequest | PoolingCoreRequest,
        model: ModelIdentity,
        draws: str,
        labels: Sequence[str] = (),
    ) -> Job | None:
        """Make the request's job. Settle the request and return None if its stream ended or is of another message.

        Args:
            model: the weights and adapter that compute the request.
            draws: name of the engine's draws.
            labels: the classes of a pooling model.
        """
        span = self._tracing.begin(incoming, prepared)
        recorded = self._homes.servers.home_at(celery_request.delivery.home, incoming.request_id)
        home = self._homes.home_of_ended(incoming.request_id, recorded)

        def claim_with(grant: Grant | None) -> StreamClaim:
            with self._homes.writing(home) as writer:
                return writer.claim(
                    incoming.request_id,
                    self._worker_name,
                    self._tracing.traceparent(span),
                    incoming.abandon_after,
                    content=celery_request.delivery.content,
                    model=model,
                    prompt_tokens=prepared.num_tokens,
                    prompt_tail=prepared.prompt_tail,
                    draws=draws,
                    grant=grant,
                )

        claim = self._claim(celery_request, claim_with)
        if claim is None:
            self._metrics.lease_lost()
            celery_request.let_go()
            return None
        if claim.has_replaced:
            logger.warning("deleted a stream that no worker can have written", request_id=incoming.request_id)
            self._metrics.stream_replaced()
        if claim.is_of_another_message:
            self._settlement.reject_duplicate(incoming.request_id, celery_request)
            return None
        if claim.ended is not None:
            self._settlement.finish_ended(celery_request, claim, claim.ended)
            return None
        trace_id = self._tracing.trace_id(span)
        if isinstance(request, PoolingCoreRequest):
            assert isinstance(prepared, PreparedInputs)
            common = common_fields(incoming, claim, celery_request, home, model, span, trace_id)
            job = PoolingJob(request=request, labels=labels, truncated=prepared.truncated, **common)
            job.resume(claim.entries)
            return job
        if isinstance(prepared, PreparedDecision):
            common = common_fields(incoming, claim, celery_request, home, model, span, trace_id)
            plan = prepared.plan
            choices = recorded_readings(claim.entries, plan)
            return DecideJob(request=request, choices=choices, questions=prepared.questions, plan=plan, **common)
        return generate_job_of(incoming, request, claim, celery_request, home, model, span, trace_id)

    def _claim(self, celery_request: CeleryRequest, claim: Callable[[Grant | None], StreamClaim]) -> StreamClaim | None:
        """Claim the stream under the message's lease. Returns None if the lease is lost."""
        grant = celery_request.delivery.grant
        while True:
            started = time.perf_counter()
            claimed = claim(grant)
            self._metrics.redis_command("claim", time.perf_counter() - started)
            if not claimed.is_stale:
                return claimed
            about = {"request_id": celery_request.id, "last_attempt": claimed.attempt}
            grant = celery_request.regrant(claimed.attempt)
            logger.info("stale claim", **about, grant=grant.number if grant is not None else None)
            if grant is None:
                return None


def generate_job_of(
    incoming: Incoming,
    request: ProcessedRequest,
    claim: StreamClaim,
    celery_request: CeleryRequest,
    home: str,
    model: ModelIdentity,
    span: Any,
    trace_id: str | None,
) -> GenerateJob:
    """Make the job of a claimed generation, with the output of earlier attempts."""
    return GenerateJob(
        request=request,
        choices=recorded_choices(claim.entries, request.params.n),
        prompt_logprobs=recorded_prompt_logprobs(claim.entries),
        **common_fields(incoming, claim, celery_request, home, model, span, trace_id),
    )


def common_fields(
    incoming: Incoming,
    claim: StreamClaim,
    celery_request: CeleryRequest,
    home: str,
    model: ModelIdentity,
    span: Any,
    trace_id: str | None,
) -> dict[str, Any]:
    """Return the fields of `Job` for a claimed request."""
    return {
        "celery_request": celery_request,
        "attempt": claim.attempt,
        "home": home,
        "queued_at": incoming.queued_at,
        "tenant": incoming.tenant,
        "abandon_after": incoming.abandon_after,
        "span": span,
        "trace_id": trace_id,
        "model": model,
        "begun_with": begun_with(claim.entries, model),
        "drawn_with": draws_of(claim.entries),
        "engine_losses": claim.engine_losses,
        "step": incoming.step,
        "preemptions": incoming.preemptions,
        "continues": claim.continues,
    }


class ListenerWatch:
    """Asks Redis for the time since each request's last subscriber heartbeat.

    While Redis is unavailable, no subscriber can send a heartbeat. So a request counts as abandoned only after Redis
    has been available for the request's whole `abandon_after`.

    Args:
        clock: monotonic time in seconds.
        when_failed: called with the error when Redis could not be asked.
    """

    def __init__(
        self,
        listeners: Listeners,
        clock: Callable[[], float] = time.monotonic,
        when_failed: Callable[[Exception], None] = lambda _error: None,
    ) -> None:
        self._listeners = listeners
        self._when_failed = when_failed
        self._clock = clock
        self._watched: set[str] = set()
        self._available_since = clock()

    def redis_was_away(self) -> None:
        """Restart the wait for heartbeats, because Redis is or was unavailable."""
        self._available_since = self._clock()

    def is_abandoned(self, job: Job) -> bool:
        """Return whether a request that is about to start has been abandoned."""
        return bool(job.abandon_after is not None and self._ask([job], over=()))

    def abandoned(self, jobs: Iterable[Job]) -> list[Job]:
        """List the abandoned jobs. Pass all jobs of the worker; Redis is not asked if none has `abandon_after`.

        A job of the last call that is missing now has ended or runs on another worker. It is no longer watched.
        """
        watched = [job for job in jobs if job.abandon_after is not None]
        over = self._watched - {job.request_id for job in watched}
        return self._ask(watched, over) if watched or over else []

    def _ask(self, jobs: Collection[Job], over: Collection[str]) -> list[Job]:
        limits = {job.request_id: job.abandon_after for job in jobs if job.abandon_after is not None}
        try:
            silence = self._listeners.silence(limits, forget=over)
        except REDIS_ERRORS as error:
            self.redis_was_away()
            self._when_failed(error)
            logger.warning("subscriber heartbeats not read", error=str(error))
            return []
        self._watched = (self._watched | limits.keys()).difference(over)
        available = self._clock() - self._available_since
        return [job for job in jobs if min(silence[job.request_id], available) >= limits[job.request_id]]
