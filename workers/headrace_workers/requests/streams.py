"""The streams of this worker's requests: their claim, their chunks and their subscribers."""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import structlog

from headrace_broker.models.identity import ModelIdentity
from headrace_broker.server.connections import REDIS_ERRORS
from headrace_broker.streams.listeners import Listeners
from headrace_broker.streams.writer import (
    Attempt,
    StreamClaim,
    StreamWrite,
    StreamWriter,
    WriteOutcome,
    begun_with,
    draws_of,
    pack_writes,
    unpack_writes,
)
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
from headrace_workers.requests.tracing import RequestTracing

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)

REPLAY_SECONDS = 10.0
"""Seconds for which written entries are kept for a replay. A replica lags behind its master by much less, and a server
that writes its append-only file every second loses at most two seconds."""


class Publisher:
    """Writes the chunks of a step to Redis in one call, and retries until Redis has them.

    It holds entries that are not written yet, and those of the last `REPLAY_SECONDS`.

    While Redis is unavailable, the entries of later steps queue up. Writing an entry twice is harmless, because Redis
    refuses its ID the second time. Memory is bounded by the tokens of the requests in flight.

    A server may lose accepted entries: when a replica takes over from its master, or a machine crashes between two
    writes to its disk. Then the latest entries are written again, so that the stream has no gap.
    """

    def __init__(self, writer: StreamWriter, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._writer = writer
        self._metrics = metrics
        self._clock = clock
        self._pending: list[StreamWrite] = []
        self._written: deque[tuple[float, bytes]] = deque()
        """Time and packed entries of each write: unpacked, the garbage collector would walk many thousand objects."""
        self._dropped: dict[Attempt, float] = {}
        """Time of each drop. A server that also lost the claim may reuse the number of a dropped attempt."""
        self.refusal: str | None = None
        """Why the last write to Redis failed; None if it did not."""
        self._failed_at: float | None = None

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def is_refused(self) -> bool:
        """Whether the last write to Redis failed."""
        return self.refusal is not None

    def add(self, *writes: StreamWrite) -> None:
        self._pending += writes

    def drop(self, attempt: Attempt) -> None:
        """Forget the entries of an attempt that this worker no longer runs, and never write them again."""
        self._pending = [write for write in self._pending if write.key != attempt]
        self._dropped.pop(attempt, None)  # keeps the dict in the order of time
        self._dropped[attempt] = self._clock()

    def flush(self, *, retry: bool = False) -> dict[Attempt, WriteOutcome] | None:
        """Write all pending entries. Returns the attempts whose stream refused an entry, or None if the write failed.

        After a failure only a call with `retry` tries again. A try at every step would send ever more entries.
        """
        if self.is_refused and not retry:
            return None
        if not self._pending:
            return {}
        started = time.perf_counter()
        packed = pack_writes(self._pending)
        try:
            refused = self._write(packed)
        except REDIS_ERRORS as error:
            self._metrics.redis_error("publish")
            self._metrics.redis_up(False)
            self.refusal = str(error)
            self._failed_at = self._clock()
            logger.warning("stream entries not written", entries=len(self._pending), error=str(error))
            return None
        self.refusal = None
        self._metrics.entries_written(len(self._pending), time.perf_counter() - started)
        self._keep(packed)
        return refused

    def _write(self, packed: bytes) -> dict[Attempt, WriteOutcome]:
        refused = self._writer.publish(self._pending, packed)
        behind = {key for key, outcome in refused.items() if outcome is WriteOutcome.ROLLED_BACK}
        if behind:
            logger.warning("stream entries lost by Redis, written again", streams=len(behind))
            again = [write for write in self._kept({request_id for request_id, _ in behind}) if write.key in behind]
            again += [write for write in self._pending if write.key in behind]
            refused = {key: outcome for key, outcome in refused.items() if key not in behind}
            refused |= self._writer.publish(again)
        if self._failed_at is not None and self._clock() - self._failed_at < REPLAY_SECONDS:
            # Redis has just failed: the server lost these streams, no client deleted them
            vanished = {key for key, outcome in refused.items() if outcome is WriteOutcome.GONE}
            refused |= dict.fromkeys(vanished, WriteOutcome.ROLLED_BACK)
        return refused

    def _kept(self, request_ids: Collection[str]) -> Iterator[StreamWrite]:
        for at, packed in self._written:
            for write in unpack_writes(packed, request_ids):
                if at > self._dropped.get(write.key, -math.inf):
                    yield write

    def _keep(self, packed: bytes) -> None:
        now = self._clock()
        self._written.append((now, packed))
        self._pending = []
        while self._written and now - self._written[0][0] > REPLAY_SECONDS:
            self._written.popleft()
        while self._dropped and now - next(iter(self._dropped.values())) > REPLAY_SECONDS:
            del self._dropped[next(iter(self._dropped))]


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
        started = time.perf_counter()
        span = self._tracing.begin(incoming, prepared)
        claim = self._writer.claim(
            incoming.request_id,
            self._worker_name,
            self._tracing.traceparent(span),
            incoming.abandon_after,
            content=celery_request.delivery.content,
            model=model,
            prompt_tokens=prepared.num_tokens,
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
        trace_id = self._tracing.trace_id(span)
        if isinstance(request, PoolingCoreRequest):
            assert isinstance(prepared, PreparedInputs)
            common = common_fields(incoming, claim, celery_request, model, span, trace_id)
            job = PoolingJob(request=request, labels=labels, truncated=prepared.truncated, **common)
            job.resume(claim.entries)
            return job
        if isinstance(prepared, PreparedDecision):
            common = common_fields(incoming, claim, celery_request, model, span, trace_id)
            plan = prepared.plan
            choices = recorded_readings(claim.entries, plan)
            return DecideJob(request=request, choices=choices, questions=prepared.questions, plan=plan, **common)
        return generate_job_of(incoming, request, claim, celery_request, model, span, trace_id)


def generate_job_of(
    incoming: Incoming,
    request: ProcessedRequest,
    claim: StreamClaim,
    celery_request: CeleryRequest,
    model: ModelIdentity,
    span: Any,
    trace_id: str | None,
) -> GenerateJob:
    """Make the job of a claimed generation, with the output of earlier attempts."""
    return GenerateJob(
        request=request,
        choices=recorded_choices(claim.entries, request.params.n),
        prompt_logprobs=recorded_prompt_logprobs(claim.entries),
        **common_fields(incoming, claim, celery_request, model, span, trace_id),
    )


def common_fields(
    incoming: Incoming,
    claim: StreamClaim,
    celery_request: CeleryRequest,
    model: ModelIdentity,
    span: Any,
    trace_id: str | None,
) -> dict[str, Any]:
    """Return the fields of `Job` for a claimed request."""
    return {
        "celery_request": celery_request,
        "attempt": claim.attempt,
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
    }


class ListenerWatch:
    """Asks Redis for the time since each request's last subscriber heartbeat.

    While Redis is unavailable, no subscriber can send a heartbeat. So a request counts as abandoned only after Redis
    has been available for the request's whole `abandon_after`.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, listeners: Listeners, clock: Callable[[], float] = time.monotonic) -> None:
        self._listeners = listeners
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
            logger.warning("subscriber heartbeats not read", error=str(error))
            return []
        self._watched = (self._watched | limits.keys()).difference(over)
        available = self._clock() - self._available_since
        return [job for job in jobs if min(silence[job.request_id], available) >= limits[job.request_id]]
