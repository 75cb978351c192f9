"""`Metrics`: the metrics of a worker, one method for each event.

The engine process sends plain numbers with its outputs, and the worker process observes them. So prometheus_client's
multiprocess mode and its directory are not needed. `families.py`, `labels.py` and `buckets.py` declare the metrics.

Methods that time a request take the id of its recorded trace. The id becomes the exemplar of the histogram's bucket.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, disable_created_metrics
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace_monitoring.exposition import ExpositionFormat, render
from headrace_monitoring.families import (
    PREFIX,
    DraftFamilies,
    EngineFamilies,
    FamilyFactory,
    GenerationFamilies,
    OptionalFamilies,
    PoolingFamilies,
    QueueFamilies,
    RequestFamilies,
    StageFamilies,
    TenantFamilies,
    WorkerFamilies,
)
from headrace_monitoring.labels import (
    ENGINE_REQUEST_STATES,
    NO_TENANT,
    OTHER,
    LabelSets,
    WorkerState,
    dead_letter_reason,
    priority_step,
)
from headrace_monitoring.logging import frames
from headrace_monitoring.step_families import StepFamilies
from headrace_wire.codes import FinishReason, ReturnReason

logger = logging.getLogger(__name__)


class DeferredObservations(Collector):
    """A thread-safe buffer of calls.

    A registry collects in the order of registration. Register this collector before all families, so that a scrape
    contains every observation.
    """

    def __init__(self) -> None:
        self._pending: Final[deque[tuple[Callable[..., None], tuple[Any, ...]]]] = deque()
        self._flushing: Final = threading.Lock()
        """One thread flushes at a time, so that gauges are set in the order of the calls."""

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, observe: Callable[..., None], *args: Any) -> None:
        """Buffer a call. The caller must not modify the arguments afterwards."""
        self._pending.append((observe, args))

    def flush(self) -> None:
        """Make all buffered calls. Log a call that fails, and continue with the next."""
        with self._flushing:
            while self._pending:
                observe, args = self._pending.popleft()
                try:
                    observe(*args)
                except Exception as error:  # noqa: BLE001  # no error may delay the restart of an engine
                    logger.error("observation failed: %s", frames(error))

    def describe(self) -> Iterable[Metric]:
        """Return no family: the collector has none."""
        return ()

    def collect(self) -> Iterable[Metric]:
        self.flush()
        return ()


Child = TypeVar("Child")

# Enqueue times come from producers' clocks. A clock that is years off must not spoil the sum of a histogram.
LONGEST_SECONDS = 30 * 24 * 3600.0

# Durations and lengths are recorded for these outcomes only: refused and cancelled requests would distort them.
SERVED: frozenset[FinishReason] = frozenset({"stop", "length"})


@dataclass(slots=True)
class Totals:
    """Totals since the start of the worker, for remote control."""

    tokens: int = 0
    """Generated."""
    inputs: int = 0
    """Of pooling requests, with a row."""
    requests: int = 0
    first_tokens: int = 0
    first_token_seconds: float = 0.0


class StepNumbers(Protocol):
    """The numbers of one step. Counts are of the step alone. States, such as `running`, are those after the step."""

    step_seconds: float
    kind: str
    """prefill, decode or mixed."""
    num_tokens: int
    num_requests: int
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_cached: int
    kv_blocks_free: int
    kv_blocks_total: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    lora_requests: dict[str, list[int]]
    """By adapter: the numbers of running and waiting requests."""
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    """This and `drafted_per_position` are empty without speculative decoding."""
    phase_seconds: dict[str, float]
    """By phase: schedule, prepare, forward, sample, draft and update."""
    num_padded_tokens: int
    compiled_graphs: int
    fallback_operators: int
    warm_up_seconds: float
    """This and the three fields above are 0 unless the device has static shapes."""


@dataclass(slots=True)
class Publication:
    """The output of one or several steps, published together."""

    num_tokens: int = 0
    """Generated tokens."""
    followed: Counter[tuple[int, float, str | None]] = field(default_factory=Counter)
    """Numbers of chunks that follow another, by (tokens, seconds since the previous chunk, id of a recorded trace).

    Most chunks of a step share all three. A chunk of n tokens counts as n equal gaps, so the mean is a mean per token.
    """
    detokenize_seconds: float = 0.0
    publish_seconds: float = 0.0
    """Time of the worker's event loop, as `detokenize_seconds`."""
    pooled: Counter[str] = field(default_factory=Counter)
    """Numbers of rows, by pooling task."""
    num_truncated: int = 0
    """How many of the rows are of inputs that were cut."""
    num_prompt_tokens: int = 0
    """Prompt tokens of requests whose first token is published, and of inputs whose row is. Cached ones included."""


MODEL_PROPERTIES = ("architecture", "dtype", "device", "attention", "engine", "engine_version")


class Metrics:
    """All metrics of one worker, on one registry. Until `show_kinds` is called, it shows those of all models.

    Args:
        registry: registers the families; None: a new registry.
        model: the served model name.
        queue: the name of the model's queue.
        version: version of Headrace, shown by `headrace_build_info`.
        stall_limit: seconds without a step after which the worker kills an engine with work.
        label_sets: the tenants and adapters that have a series each. All others count as "other".
        clock: returns the unix time in seconds.
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        model: str,
        queue: str,
        version: str = "unknown",
        stall_limit: float = 60.0,
        label_sets: LabelSets | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        # the `_created` series would double the size of a scrape, and no panel reads them
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry() if registry is None else registry
        self._sets = LabelSets() if label_sets is None else label_sets
        self._clock = clock
        self._deferred = DeferredObservations()
        self.registry.register(self._deferred)
        make = FamilyFactory(self.registry, model=model)
        self._queue = QueueFamilies(FamilyFactory(self.registry, model=model, queue=queue))
        self._steps = StepFamilies()
        steps = FamilyFactory(self._steps.registry, model=model)
        self._requests = RequestFamilies(make)
        self._stages = StageFamilies(steps)
        self._shown_of_generations, self._shown_of_pooling = OptionalFamilies(), OptionalFamilies()
        self._generations = GenerationFamilies(FamilyFactory(self._shown_of_generations.registry, model=model))
        self._pooling = PoolingFamilies(FamilyFactory(self._shown_of_pooling.registry, model=model))
        self.registry.register(self._shown_of_generations)
        self.registry.register(self._shown_of_pooling)
        self._engine = EngineFamilies(make, steps, self._sets)
        self._drafts = DraftFamilies(steps)
        self.registry.register(self._steps)
        self._worker = WorkerFamilies(make)
        self._tenants = TenantFamilies(make, self._sets)
        self.totals = Totals()
        make.gauges("build_info", "Version of the worker.", version=(version,))[version].set(1)
        self._model = model
        self._model_info = Gauge(
            PREFIX + "model_info",
            "The model as the engine loaded it.",
            ("model", *MODEL_PROPERTIES),
            registry=self.registry,
        )
        self._model_info.labels(model, *("" for _ in MODEL_PROPERTIES)).set(1)
        ProcessCollector(registry=self.registry)
        self.worker_state("loading")
        self.heartbeat()
        self._engine.last_step.set(clock())
        self._engine.stall_limit.set(stall_limit)

    def exposition(self, form: ExpositionFormat = ExpositionFormat.TEXT) -> bytes:
        """Return the response to a scrape."""
        return render(self.registry, form)

    # The queue

    def message_received(
        self,
        priority: int,
        wait_seconds: float | None,
        tenant: str | None = None,
        *,
        clock: str | None = None,
        trace_id: str | None = None,
    ) -> None:
        """Count a message taken from the queue. `wait_seconds` and `clock` are None if the wait is unknown."""
        self._queue.received.inc()
        self._queue.timed[clock or "none"].inc()
        if (wait := _elapsed(wait_seconds)) is not None:
            self._queue.wait[str(priority_step(priority))].observe(wait, _exemplar(trace_id))
            self._tenants.queue_wait[self._tenant(tenant)].observe(wait)

    def message_redelivered(self) -> None:
        """Count a received message that another worker had received before."""
        self._queue.redelivered.inc()

    def message_returned(self, reason: ReturnReason) -> None:
        """Count a message returned to the queue."""
        self._queue.returned[reason].inc()

    def stream_replaced(self) -> None:
        """Count a stream that was deleted and created again, because no worker can have written it."""
        self._queue.streams_replaced.inc()

    def stream_gone(self) -> None:
        """Count a stream that disappeared while its request ran."""
        self._requests.streams_gone.inc()

    def lease_lost(self) -> None:
        """Count a lease that expired and that another worker has taken over."""
        self._queue.leases_lost.inc()

    def dead_lettered(self, reason: str) -> None:
        """Count a dead letter. The label is the part of the reason before a colon, as in "undecodable: ValueError"."""
        self._queue.dead_lettered[dead_letter_reason(reason)].inc()

    def queue_depth(self, ready: int, unacked: int, dead: int, oldest_age_seconds: float | None) -> None:
        """Set the counts and the age that were read from Redis. The age is None if no message is ready."""
        for state, count in {"ready": ready, "unacked": unacked, "dead": dead}.items():
            self._queue.messages[state].set(count)
        self._queue.oldest_age.set(_elapsed(oldest_age_seconds) or 0.0)

    def queue_blocked(self, blocked: bool) -> None:
        """Set whether Redis gives this worker no messages, because it refuses or because a key has the wrong type."""
        self._queue.blocked.set(blocked)

    def tenants_queued(self, counts: Mapping[str, int]) -> None:
        """Set the numbers of ready messages by tenant. '' counts the messages without a tenant."""
        totals = dict.fromkeys(self._tenants.queued, 0)
        for name, count in counts.items():
            totals[self._tenant(name or None)] += count
        for value, total in totals.items():
            self._tenants.queued[value].set(total)

    # Requests

    def request_started(self) -> None:
        """Count a request sent to the engine. `request_finished` or `request_requeued` must follow."""
        self._requests.in_flight.inc()

    def request_resumed_across_draws(self) -> None:
        """Count a sampled request that continues with other random numbers than its first worker would have used."""
        self._generations.resumed_across_draws.inc()

    def request_admitted(self, engine_queue_seconds: float, *, trace_id: str | None = None) -> None:
        """Record how long a request waited in the engine for its first step."""
        if (waited := _elapsed(engine_queue_seconds)) is not None:
            self._stages.queue.observe(waited, _exemplar(trace_id))

    def first_token(
        self,
        seconds_since_enqueue: float | None,
        engine_seconds: float,
        prefill_seconds: float | None = None,
        *,
        trace_id: str | None = None,
    ) -> None:
        """Record the first published token of a request.

        Args:
            seconds_since_enqueue: None if unknown.
            engine_seconds: since the engine received the request.
            prefill_seconds: since the request's first step.
            trace_id: id of the recorded trace.
        """
        exemplar = _exemplar(trace_id)
        if (prefill := _elapsed(prefill_seconds)) is not None:
            self._stages.prefill.observe(prefill, exemplar)
        if (since_enqueue := _elapsed(seconds_since_enqueue)) is not None:
            self._generations.time_to_first_token.observe(since_enqueue, exemplar)
            self.totals.first_tokens += 1
            self.totals.first_token_seconds += since_enqueue
        if (in_engine := _elapsed(engine_seconds)) is not None:
            self._generations.engine_time_to_first_token.observe(in_engine, exemplar)

    def published(self, publication: Publication) -> None:
        """Record a publication. The caller must not modify it afterwards."""
        self._deferred.add(self._published, publication)
        self.totals.tokens += publication.num_tokens
        self.totals.inputs += publication.pooled.total()

    def _published(self, publication: Publication) -> None:
        self._generations.generation_tokens.inc(publication.num_tokens)
        for (count, seconds, trace_id), chunks in publication.followed.items():
            if (gap := _elapsed(seconds)) is not None:
                self._generations.inter_token_latency.observe_equal(gap / count, chunks * count, _exemplar(trace_id))
        for task, count in publication.pooled.items():
            self._pooling.inputs[task].inc(count)
        self._pooling.truncated.inc(publication.num_truncated)
        self._worker.result_seconds["detokenize"].inc(publication.detokenize_seconds)
        self._worker.result_seconds["publish"].inc(publication.publish_seconds)

    def request_finished(
        self,
        outcome: FinishReason,
        duration_seconds: float,
        prompt_tokens: int,
        cached_tokens: int,
        generation_tokens: int,
        *,
        tenant: str | None = None,
        decode_seconds: float | None = None,
        decoded_tokens: int = 0,
        trace_id: str | None = None,
    ) -> None:
        """Record the end of a started request.

        Args:
            outcome: how the request ended.
            duration_seconds: since its enqueue, or since its receipt if the time of the enqueue is unknown.
            prompt_tokens: number of prompt tokens.
            cached_tokens: prompt tokens found in the prefix cache.
            generation_tokens: number of generated tokens.
            tenant: None if the request has none.
            decode_seconds: from the first to the last token that this worker published.
            decoded_tokens: tokens published in `decode_seconds`.
            trace_id: id of the recorded trace.
        """
        self._requests.in_flight.dec()
        self._finished(outcome, tenant)
        tokens, name = self._tenants.tokens, self._tenant(tenant)
        tokens[name, "prompt"].inc(prompt_tokens)
        tokens[name, "generated"].inc(generation_tokens)
        self._requests.prompt_tokens["cached"].inc(cached_tokens)
        self._requests.prompt_tokens["computed"].inc(prompt_tokens - cached_tokens)
        if outcome in SERVED:
            exemplar = _exemplar(trace_id)
            if (duration := _elapsed(duration_seconds)) is not None:
                self._requests.duration.observe(duration, exemplar)
            self._requests.prompt_length.observe(prompt_tokens)
            self._generations.generation_length.observe(generation_tokens)
            if (decode := _elapsed(decode_seconds)) is not None:
                self._generations.decode.observe(decode, exemplar)
                if decoded_tokens:
                    self._generations.time_per_output_token.observe(decode / decoded_tokens, exemplar)

    def request_refused(self, outcome: FinishReason, tenant: str | None = None) -> None:
        """Count a request that ended before it was sent to the engine: rejected, expired or cancelled."""
        self._finished(outcome, tenant)

    def _finished(self, outcome: FinishReason, tenant: str | None) -> None:
        self.totals.requests += 1
        self._requests.finished[outcome].inc()
        self._tenants.requests[self._tenant(tenant), outcome].inc()

    def _tenant(self, name: str | None) -> str:
        """Return the label value of a tenant. Only tenants that the operator names have a series each."""
        if name is None:
            return NO_TENANT
        return name if name in self._sets.tenants else OTHER

    def request_requeued(self) -> None:
        """Count down a started request that was requeued."""
        self._requests.in_flight.dec()

    # The engine

    def step(self, stats: StepNumbers) -> None:
        """Record a step of the engine."""
        self._deferred.add(self._stepped, self._clock(), stats)

    def _stepped(self, at: float, stats: StepNumbers) -> None:
        engine = self._engine
        engine.last_step.set(at)
        if stats.num_tokens:  # a step that only ends requests computes no tokens and has no kind
            engine.step_seconds[stats.kind].observe(stats.step_seconds)
            engine.step_tokens.observe(stats.num_tokens)
            engine.step_requests.observe(stats.num_requests)
        for phase, seconds in stats.phase_seconds.items():
            engine.phase_seconds[phase].inc(seconds)
        engine.requests["running"].set(stats.running)
        engine.requests["waiting"].set(stats.waiting)
        self._lora_requests(stats.lora_requests)
        engine.kv_blocks["used"].set(stats.kv_blocks_used)
        engine.kv_blocks["cached"].set(stats.kv_blocks_cached)
        engine.kv_blocks["free"].set(stats.kv_blocks_free)
        engine.kv_usage.set(stats.kv_blocks_used / max(stats.kv_blocks_total, 1))
        for counter, count in (
            (engine.prefix_queried, stats.prefix_queried_tokens),
            (engine.prefix_hit, stats.prefix_hit_tokens),
            (engine.preemptions, stats.preemptions),
            (engine.padded_tokens, stats.num_padded_tokens),
        ):
            if count:  # 0 in most steps
                counter.inc(count)
        engine.compiled_graphs.set(stats.compiled_graphs)
        engine.fallback_operators.set(stats.fallback_operators)
        engine.warm_up_seconds.set(stats.warm_up_seconds)
        for children, counts in (
            (self._drafts.drafted, stats.drafted_per_position),
            (self._drafts.accepted, stats.accepted_per_position),
        ):
            for position, count in enumerate(counts, start=1):
                children[str(position)].inc(count)

    def steps_report_only(self, numbers: Collection[str]) -> None:
        """Set the fields of `StepNumbers` that the engine reports. Series that need other fields are absent."""
        self._steps.report_only(numbers)

    def show_kinds(self, *, generates: bool, pools: bool) -> None:
        """Set which models' families are shown: of those that generate, and of those that embed, score or classify."""
        self._shown_of_generations.is_shown, self._shown_of_pooling.is_shown = generates, pools

    def _lora_requests(self, by_adapter: Mapping[str, Sequence[int]]) -> None:
        levels = dict.fromkeys(self._engine.lora_requests, 0)
        for adapter, counts in by_adapter.items():
            known = adapter if (adapter, "running") in levels else OTHER
            for state, count in zip(ENGINE_REQUEST_STATES, counts, strict=True):
                levels[known, state] += count
        for labels, level in levels.items():
            self._engine.lora_requests[labels].set(level)

    def engine_up(self, up: bool) -> None:
        """Set whether the engine process is ready. If it has ended, its requests and KV blocks are gone."""
        self._deferred.flush()  # the levels of the last steps must be set before these
        self._engine.up.set(up)
        self._engine.load_progress.set(up)
        if up:
            self._engine.last_step.set(self._clock())
            return
        self._lora_requests({})
        for gauge in (*self._engine.requests.values(), *self._engine.kv_blocks.values(), self._engine.kv_usage):
            gauge.set(0)

    def model_loading(self, share: float) -> None:
        """Set the share of the weights that is loaded, 0 to 1. It is 1 while the engine is ready."""
        self._engine.load_progress.set(share)

    def model_loaded(
        self, *, architecture: str, dtype: str, device: str, attention: str, engine: str, engine_version: str
    ) -> None:
        """Set the properties that the engine reported at its start."""
        self._model_info.clear()
        self._model_info.labels(self._model, architecture, dtype, device, attention, engine, engine_version).set(1)

    def engine_restarted(self, reason: str) -> None:
        _child(self._engine.restarts, reason).inc()

    # The worker

    def worker_state(self, state: WorkerState) -> None:
        for name, gauge in self._worker.state.items():
            gauge.set(name == state)

    def slots(self, used: int, total: int) -> None:
        self._worker.slots["used"].set(used)
        self._worker.slots["free"].set(total - used)

    def heartbeat(self) -> None:
        """Record an iteration of the worker's event loop. Must be called by that loop."""
        self._worker.heartbeat.set(self._clock())
        self._deferred.flush()  # limits the buffer if nothing scrapes

    def loop_lag(self, seconds: float) -> None:
        """Record the longest time for which the event loop was blocked since the last call."""
        self._worker.loop_lag.observe(max(seconds, 0.0))

    def entries_written(self, count: int, seconds: float) -> None:
        """Record stream entries written to Redis in one round trip."""
        self._deferred.add(self._entries_written, count, seconds)

    def _entries_written(self, count: int, seconds: float) -> None:
        self._worker.redis_seconds["publish"].observe(seconds)
        self._worker.redis_up.set(True)
        self._worker.stream_entries.inc(count)

    def redis_up(self, up: bool) -> None:
        self._deferred.add(self._worker.redis_up.set, up)

    def redis_command(self, command: str, seconds: float) -> None:
        self._deferred.add(_child(self._worker.redis_seconds, command).observe, seconds)

    def redis_error(self, command: str) -> None:
        _child(self._worker.redis_errors, command).inc()


def _child(children: Mapping[str, Child], value: str) -> Child:
    """Return the series of a label value, or that of "other": an unknown value must not add a series."""
    return children.get(value, children[OTHER])


def _exemplar(trace_id: str | None) -> dict[str, str] | None:
    return None if trace_id is None else {"trace_id": trace_id}


def _elapsed(seconds: float | None) -> float | None:
    """Clip a duration to 0 to LONGEST_SECONDS: two clocks can differ. None if it is unknown or not finite."""
    if seconds is None or not math.isfinite(seconds):
        return None
    return min(max(seconds, 0.0), LONGEST_SECONDS)
