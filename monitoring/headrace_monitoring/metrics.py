"""`Metrics`: what the workers tell Prometheus, in verbs that take plain numbers.

The process that owns the registry observes; the engine process sends plain numbers with its results. So there is no
multiprocess mode, no directory of counters to wipe, and the caller holds no Prometheus code. What is declared where:
`families.py`, `labels.py`, `buckets.py`.

Verbs that time a request take the id of its trace, where a trace of it is recorded. It becomes the exemplar of the
bucket: the request to look at when a latency is to be explained.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, disable_created_metrics

from headrace_monitoring.deferred import DeferredObservations
from headrace_monitoring.exposition import ExpositionFormat, render
from headrace_monitoring.families import (
    PREFIX,
    DraftFamilies,
    EngineFamilies,
    FamilyFactory,
    QueueFamilies,
    RequestFamilies,
    StageFamilies,
    TenantFamilies,
    WorkerFamilies,
)
from headrace_monitoring.labels import ENGINE_REQUEST_STATES, NO_TENANT, OTHER, LabelSets, Outcome, WorkerState
from headrace_monitoring.step_families import StepFamilies

Child = TypeVar("Child")

# Enqueue times come from producers' clocks. One that is years off must not spoil a histogram's sum for ever.
LONGEST_SECONDS = 30 * 24 * 3600.0

# The outcomes whose durations and lengths say something about the service: a refusal is fast, a cancellation short.
SERVED: frozenset[Outcome] = frozenset({"stop", "length"})


@dataclass(slots=True)
class Totals:
    """Count what happened since the worker started, for remote control."""

    tokens: int = 0
    requests: int = 0
    first_tokens: int = 0
    first_token_seconds: float = 0.0


class StepStats(Protocol):
    """The numbers of one step. Counts are those of the step, levels are as they stand after it. They do not change."""

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
    """By adapter: how many run and wait."""
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    """Empty without speculative decoding, as the one before."""
    phase_seconds: dict[str, float]
    """Of schedule, prepare, forward, sample, draft and update."""
    num_padded_tokens: int
    compiled_graphs: int
    fallback_operators: int
    warm_up_seconds: float
    """0 unless the device has static shapes, as the three before."""


MODEL_PROPERTIES = ("architecture", "dtype", "device", "attention", "engine", "engine_version")


class Metrics:
    """All metrics of one worker, on one registry.

    Args:
        registry: where the families go; a fresh registry when None.
        model: the served model name.
        queue: the name of the model's queue.
        version: of Headrace, shown by `headrace_build_info`.
        stall_limit: seconds without a step after which the worker kills an engine with work.
        label_sets: the reasons and commands that get a series of their own; anything else is counted as "other".
        clock: unix time in seconds.
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
        # a `_created` series beside each child doubles the exposition, and no panel reads it
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry() if registry is None else registry
        self._sets = LabelSets() if label_sets is None else label_sets
        self._clock = clock
        self._deferred = DeferredObservations()
        self.registry.register(self._deferred)
        make = FamilyFactory(self.registry, model=model)
        self._queue = QueueFamilies(FamilyFactory(self.registry, model=model, queue=queue), self._sets)
        self._steps = StepFamilies()
        steps = FamilyFactory(self._steps.registry, model=model)
        self._requests = RequestFamilies(make)
        self._stages = StageFamilies(make, steps)
        self._engine = EngineFamilies(make, steps, self._sets)
        self._drafts = DraftFamilies(steps)
        self.registry.register(self._steps)
        self._worker = WorkerFamilies(make, self._sets)
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
        """What Prometheus scrapes."""
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
        """A message was taken from the queue. `wait_seconds` is None when no `clock` tells it."""
        self._queue.received.inc()
        self._queue.timed[clock or "none"].inc()
        if (wait := _elapsed(wait_seconds)) is not None:
            self._queue.wait[str(self._sets.priority_step(priority))].observe(wait, _exemplar(trace_id))
            self._tenants.queue_wait[self._tenant(tenant)].observe(wait)

    def message_redelivered(self) -> None:
        """The message just received had been with a worker before."""
        self._queue.redelivered.inc()

    def message_returned(self, reason: str) -> None:
        """A message goes back to the queue; `reason` is one of `labels.RETURN_REASONS`."""
        self._queue.returned[reason].inc()

    def stream_replaced(self) -> None:
        """A stream was deleted and begun anew, as no worker can have written it."""
        self._queue.streams_replaced.inc()

    def stream_gone(self) -> None:
        """A stream was deleted under a running request."""
        self._requests.streams_gone.inc()

    def lease_lost(self) -> None:
        """Another worker has taken a message that this one held."""
        self._queue.leases_lost.inc()

    def dead_lettered(self, reason: str) -> None:
        """A message was given up. Of "undecodable: ValueError" the word before the colon is counted."""
        self._queue.dead_lettered[self._sets.dead_letter_reason(reason)].inc()

    def queue_depth(self, ready: int, unacked: int, dead: int, oldest_age_seconds: float | None) -> None:
        """Levels read from Redis; a key that is not there counts 0, and no ready message is age None."""
        for state, count in {"ready": ready, "unacked": unacked, "dead": dead}.items():
            self._queue.messages[state].set(count)
        self._queue.oldest_age.set(_elapsed(oldest_age_seconds) or 0.0)

    def queue_blocked(self, blocked: bool) -> None:
        """Whether Redis, or a key of the wrong type, keeps this worker from the queue's messages."""
        self._queue.blocked.set(blocked)

    def tenants_queued(self, counts: Mapping[str, int]) -> None:
        """Ready messages by tenant, read from Redis; '' is the tenant of those that name none."""
        totals = dict.fromkeys(self._tenants.queued, 0)
        for name, count in counts.items():
            totals[self._tenant(name or None)] += count
        for value, total in totals.items():
            self._tenants.queued[value].set(total)

    # Requests

    def request_started(self) -> None:
        """A request went to the engine. One of `request_finished` and `request_handed_back` must follow."""
        self._requests.in_flight.inc()

    def request_resumed_across_draws(self) -> None:
        """A sampled request goes on, and its tokens are not those that its first worker would have drawn."""
        self._requests.resumed_across_draws.inc()

    def request_admitted(self, engine_queue_seconds: float, *, trace_id: str | None = None) -> None:
        """The engine began the first step of a request."""
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
        """The first token of a request was published, `engine_seconds` after the engine got it.

        `prefill_seconds` are those of them since the request's first step.
        """
        exemplar = _exemplar(trace_id)
        if (prefill := _elapsed(prefill_seconds)) is not None:
            self._stages.prefill.observe(prefill, exemplar)
        if (since_enqueue := _elapsed(seconds_since_enqueue)) is not None:
            self._requests.time_to_first_token.observe(since_enqueue, exemplar)
            self.totals.first_tokens += 1
            self.totals.first_token_seconds += since_enqueue
        if (in_engine := _elapsed(engine_seconds)) is not None:
            self._requests.engine_time_to_first_token.observe(in_engine, exemplar)

    def tokens_published(self, count: int) -> None:
        """So many tokens of all requests came out of one step."""
        self._deferred.add(self._requests.generation_tokens.inc, count)
        self.totals.tokens += count

    def tokens_followed(
        self, count: int, seconds_since_last: float, chunks: int = 1, *, trace_id: str | None = None
    ) -> None:
        """Chunks of so many tokens each were published behind earlier ones of their requests.

        A chunk counts as that many equal gaps, so that a mean is a mean per token.
        """
        if (gap := _elapsed(seconds_since_last)) is not None:
            observe = self._requests.inter_token_latency.observe_equal
            self._deferred.add(observe, gap / count, chunks * count, _exemplar(trace_id))

    def request_finished(
        self,
        outcome: Outcome,
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
        """A started request ended, `duration_seconds` after its enqueue (after its receipt when that is unknown).

        `decode_seconds` are those from the first to the last token that this worker published, `decoded_tokens` the
        tokens that came in them.
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
            self._requests.generation_length.observe(generation_tokens)
            if (decode := _elapsed(decode_seconds)) is not None:
                self._stages.decode.observe(decode, exemplar)
                if decoded_tokens:
                    self._requests.time_per_output_token.observe(decode / decoded_tokens, exemplar)

    def request_refused(self, outcome: Outcome, tenant: str | None = None) -> None:
        """A request ended that never went to the engine: rejected, expired or cancelled in the queue."""
        self._finished(outcome, tenant)

    def _finished(self, outcome: Outcome, tenant: str | None) -> None:
        self.totals.requests += 1
        self._requests.finished[outcome].inc()
        self._tenants.requests[self._tenant(tenant), outcome].inc()

    def _tenant(self, name: str | None) -> str:
        """The label value of a tenant: one that the operator did not name must not become a series."""
        if name is None:
            return NO_TENANT
        return name if name in self._sets.tenants else OTHER

    def request_handed_back(self) -> None:
        """A started request went back to the queue unfinished, for another worker to continue."""
        self._requests.in_flight.dec()

    # The engine

    def step(self, stats: StepStats) -> None:
        """One step of the engine."""
        self._deferred.add(self._stepped, self._clock(), stats)

    def _stepped(self, at: float, stats: StepStats) -> None:
        engine = self._engine
        engine.last_step.set(at)
        if stats.num_tokens:  # a step that only ends requests computes nothing and has no kind
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
            if count:  # of most steps none
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

    def steps_tell_only(self, numbers: Collection[str]) -> None:
        """The engine's steps tell these numbers of `StepStats`; the series of others are absent from now on."""
        self._steps.tell_only(numbers)

    def _lora_requests(self, by_adapter: Mapping[str, Sequence[int]]) -> None:
        levels = dict.fromkeys(self._engine.lora_requests, 0)
        for adapter, counts in by_adapter.items():
            known = adapter if (adapter, "running") in levels else OTHER
            for state, count in zip(ENGINE_REQUEST_STATES, counts, strict=True):
                levels[known, state] += count
        for labels, level in levels.items():
            self._engine.lora_requests[labels].set(level)

    def engine_up(self, up: bool) -> None:
        """The engine process is ready for its first step, or is gone with all it held."""
        self._deferred.settle()  # its last steps' levels must not come after these
        self._engine.up.set(up)
        if up:
            self._engine.last_step.set(self._clock())
            return
        self._lora_requests({})
        for gauge in (*self._engine.requests.values(), *self._engine.kv_blocks.values(), self._engine.kv_usage):
            gauge.set(0)

    def model_loaded(
        self, *, architecture: str, dtype: str, device: str, attention: str, engine: str, engine_version: str
    ) -> None:
        """What the engine said about the model, and itself, when it was ready."""
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
        """One turn of the loop that does the work. Called from any other thread it would prove nothing."""
        self._worker.heartbeat.set(self._clock())
        self._deferred.settle()  # where nobody scrapes, nothing gathers

    def loop_lag(self, seconds: float) -> None:
        """The longest time since the last call in which the loop saw to nothing else."""
        self._worker.loop_lag.observe(max(seconds, 0.0))

    def result_phases(self, detokenize: float, publish: float) -> None:
        """Seconds that the worker's loop spent on the results of one step."""
        self._deferred.add(self._worker.result_seconds["detokenize"].inc, detokenize)
        self._deferred.add(self._worker.result_seconds["publish"].inc, publish)

    def stream_entries(self, count: int) -> None:
        """Redis took entries of streams."""
        self._deferred.add(self._worker.stream_entries.inc, count)

    def redis_up(self, up: bool) -> None:
        self._deferred.add(self._worker.redis_up.set, up)

    def redis_command(self, command: str, seconds: float) -> None:
        self._deferred.add(_child(self._worker.redis_seconds, command).observe, seconds)

    def redis_error(self, command: str) -> None:
        _child(self._worker.redis_errors, command).inc()


def _child(children: Mapping[str, Child], value: str) -> Child:
    """The series of a label value, or that of "other": an unforeseen value must not grow the exposition."""
    return children.get(value, children[OTHER])


def _exemplar(trace_id: str | None) -> dict[str, str] | None:
    return None if trace_id is None else {"trace_id": trace_id}


def _elapsed(seconds: float | None) -> float | None:
    """A time span fit for a histogram; None if there is none. Two clocks can make it negative, or absurd."""
    if seconds is None or not math.isfinite(seconds):
        return None
    return min(max(seconds, 0.0), LONGEST_SECONDS)
