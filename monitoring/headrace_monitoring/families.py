"""The metric families of a worker, each declared once: name, help, labels, buckets.

Names follow the conventions of Prometheus: prefix `headrace_`, base units (seconds, tokens, ratios between 0 and 1),
counters end in `_total`. Every family has the label `model`, and those of the queue also `queue`. `metrics.py` sets
their values.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace_monitoring import buckets, labels
from headrace_wire.codes import DEAD_LETTER_LABELS, FINISH_REASONS, PRIORITY_STEPS
from headrace_wire.pooling import POOLING_TASKS

PREFIX = "headrace_"


class RepeatingHistogram(Histogram):
    """A histogram that can record many equal observations in one call."""

    def observe_equal(self, amount: float, count: int, exemplar: dict[str, str] | None = None) -> None:
        """Record `count` observations of `amount`. `count` is at least 1."""
        self.observe(amount, exemplar)
        if count > 1:
            self._sum.inc(amount * (count - 1))
            self._buckets[bisect_left(self._upper_bounds, amount)].inc(count - 1)


class FamilyFactory:
    """Declares families with constant labels, and creates all their children at once.

    The keyword arguments of its methods are further labels with all their possible values.
    """

    def __init__(self, registry: CollectorRegistry, **constant_labels: str) -> None:
        self._registry = registry
        self._names = tuple(constant_labels)
        self._values = tuple(constant_labels.values())

    def counter(self, name: str, documentation: str) -> Counter:
        family = Counter(PREFIX + name, documentation, self._names, registry=self._registry)
        return family.labels(*self._values) if self._names else family

    def counters(self, name: str, documentation: str, /, **label: Sequence[str]) -> dict[str, Counter]:
        return {value: child for (value,), child in self.grid(name, documentation, **label).items()}

    def grid(self, name: str, documentation: str, /, **labels: Sequence[str]) -> dict[tuple[str, ...], Counter]:
        """Return a counter for every combination of label values."""
        family = Counter(PREFIX + name, documentation, (*self._names, *labels), registry=self._registry)
        return {cell: family.labels(*self._values, *cell) for cell in itertools.product(*labels.values())}

    def gauge(self, name: str, documentation: str) -> Gauge:
        family = Gauge(PREFIX + name, documentation, self._names, registry=self._registry)
        return family.labels(*self._values) if self._names else family

    def gauges(self, name: str, documentation: str, /, **label: Sequence[str]) -> dict[str, Gauge]:
        return {value: child for (value,), child in self.gauge_grid(name, documentation, **label).items()}

    def gauge_grid(self, name: str, documentation: str, /, **labels: Sequence[str]) -> dict[tuple[str, ...], Gauge]:
        """Return a gauge for every combination of label values."""
        family = Gauge(PREFIX + name, documentation, (*self._names, *labels), registry=self._registry)
        return {cell: family.labels(*self._values, *cell) for cell in itertools.product(*labels.values())}

    def histogram(self, name: str, documentation: str, bounds: Sequence[float]) -> RepeatingHistogram:
        family = RepeatingHistogram(PREFIX + name, documentation, self._names, registry=self._registry, buckets=bounds)
        return family.labels(*self._values) if self._names else family

    def histograms(
        self, name: str, documentation: str, bounds: Sequence[float], /, **label: Sequence[str]
    ) -> dict[str, Histogram]:
        names, (values,) = (*self._names, *label), label.values()
        family = Histogram(PREFIX + name, documentation, names, registry=self._registry, buckets=bounds)
        return {value: family.labels(*self._values, value) for value in values}


class OptionalFamilies(Collector):
    """Collects the families of `registry` while they are shown.

    Families that are never set would stay 0, and a reader would take the 0 for a measurement.
    """

    def __init__(self) -> None:
        self.registry: Final = CollectorRegistry()
        self.is_shown = True

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self.registry.collect() if self.is_shown else ()


class QueueFamilies:
    """The queue in Redis, and the messages that this worker received from it."""

    def __init__(self, make: FamilyFactory) -> None:
        self.messages = make.gauges("queue_messages", "Messages of the queue by state.", state=labels.MESSAGE_STATES)
        self.oldest_age = make.gauge(
            "queue_oldest_message_age_seconds", "Age of the oldest ready message; 0: none is ready."
        )
        self.blocked = make.gauge("queue_blocked", "1 while Redis gives no messages of the queue to workers.")
        self.wait = make.histograms(
            "queue_wait_seconds",
            "Time from the enqueue of a message until a worker took it.",
            buckets.QUEUE_WAIT,
            priority=[str(step) for step in PRIORITY_STEPS],
        )
        self.timed = make.counters(
            "queue_timed_messages_total",
            "Messages taken, by the clock that measured their wait.",
            clock=labels.CLOCKS,
        )
        self.received = make.counter("queue_received_messages_total", "Messages this worker took from the queue.")
        self.redelivered = make.counter(
            "queue_redelivered_messages_total", "Messages received that another worker had received before."
        )
        self.returned = make.counters(
            "queue_returned_messages_total",
            "Messages that this worker returned to the queue.",
            reason=labels.RETURN_REASONS,
        )
        self.streams_replaced = make.counter(
            "streams_replaced_total", "Streams that no worker can have written. They were deleted and created again."
        )
        self.leases_lost = make.counter("leases_lost_total", "Leases of this worker that expired and were taken over.")
        self.dead_lettered = make.counters(
            "queue_dead_lettered_messages_total",
            "Messages moved to the dead letters.",
            reason=(*DEAD_LETTER_LABELS, labels.OTHER),
        )


class RequestFamilies:
    """Requests, as their subscribers see them."""

    def __init__(self, make: FamilyFactory) -> None:
        self.finished = make.counters(
            "requests_total", "Requests whose stream ended, by outcome.", outcome=FINISH_REASONS
        )
        self.streams_gone = make.counter(
            "streams_gone_total", "Streams that disappeared from Redis while their request ran."
        )
        self.in_flight = make.gauge("requests_in_flight", "Requests that this worker started and that have not ended.")
        self.duration = make.histogram(
            "request_duration_seconds",
            "Time from the enqueue of a request until its stream ended; outcomes stop and length only.",
            buckets.REQUEST_DURATION,
        )
        self.prompt_length = make.histogram(
            "request_prompt_tokens", "Prompt tokens of a request; outcomes stop and length.", buckets.REQUEST_TOKENS
        )
        self.prompt_tokens = make.counters(
            "prompt_tokens_total",
            "Prompt tokens of finished requests: computed, or found in the prefix cache.",
            source=labels.PROMPT_SOURCES,
        )


class GenerationFamilies:
    """The tokens of models that generate. A worker of another model does not show these families."""

    def __init__(self, make: FamilyFactory) -> None:
        self.resumed_across_draws = make.counter(
            "resumed_across_draws_total",
            "Sampled requests that this worker continued with other random numbers than their earlier attempts.",
        )
        self.time_to_first_token = make.histogram(
            "time_to_first_token_seconds",
            "Time from the enqueue of a request until its first token was published.",
            buckets.TIME_TO_FIRST_TOKEN,
        )
        self.engine_time_to_first_token = make.histogram(
            "engine_time_to_first_token_seconds",
            "Time from the start of a request in the engine until its first token.",
            buckets.TIME_TO_FIRST_TOKEN,
        )
        self.inter_token_latency = make.histogram(
            "inter_token_latency_seconds",
            "Time between two tokens of a request as published.",
            buckets.INTER_TOKEN_LATENCY,
        )
        self.generation_length = make.histogram(
            "request_generation_tokens",
            "Generated tokens of a request; outcomes stop and length.",
            buckets.REQUEST_TOKENS,
        )
        self.generation_tokens = make.counter("generation_tokens_total", "Tokens published by this worker.")
        self.time_per_output_token = make.histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a request between two of its tokens; outcomes stop and length only.",
            buckets.INTER_TOKEN_LATENCY,
        )
        self.decode = make.histogram(
            "engine_decode_seconds",
            "Time of a request from its first to its last token; outcomes stop and length only.",
            buckets.ENGINE_STAGE,
        )


class PoolingFamilies:
    """The rows of models that embed, score or classify. A worker of another model does not show these families."""

    def __init__(self, make: FamilyFactory) -> None:
        self.inputs = make.counters(
            "pooled_inputs_total", "Inputs whose row was published by this worker, by task.", task=POOLING_TASKS
        )
        self.truncated = make.counter(
            "truncated_inputs_total", "Inputs whose row was published by this worker and that were cut to fit."
        )


class StageFamilies:
    """The duration of the first stages of a request, which only some engines report."""

    def __init__(self, steps: FamilyFactory) -> None:
        self.queue = steps.histogram(
            "engine_queue_seconds", "Time of a request in the engine before its first step.", buckets.ENGINE_STAGE
        )
        self.prefill = steps.histogram(
            "engine_prefill_seconds",
            "Time of a request from its first step until its first token.",
            buckets.ENGINE_STAGE,
        )


class TenantFamilies:
    """Requests, tokens and messages by tenant. Only tenants that the operator names have a series each."""

    def __init__(self, make: FamilyFactory, sets: labels.LabelSets) -> None:
        tenants = sets.tenant_values
        self.requests = make.grid(
            "tenant_requests_total",
            "Requests whose stream ended, by tenant and outcome.",
            tenant=tenants,
            outcome=FINISH_REASONS,
        )
        self.tokens = make.grid(
            "tenant_tokens_total",
            "Prompt tokens of finished requests and tokens generated for them, by tenant.",
            tenant=tenants,
            kind=labels.TENANT_TOKENS,
        )
        self.queued = make.gauges(
            "tenant_queued_messages", "Ready messages that a worker has sorted by tenant.", tenant=tenants
        )
        self.queue_wait = make.histograms(
            "tenant_queue_wait_seconds",
            "Time from the enqueue of a message until a worker took it, by tenant.",
            buckets.TENANT_QUEUE_WAIT,
            tenant=tenants,
        )


class EngineFamilies:
    """The step loop and its memory, reported once per step. `steps` makes families that only some engines report."""

    def __init__(self, make: FamilyFactory, steps: FamilyFactory, sets: labels.LabelSets) -> None:
        self.up = make.gauge("engine_up", "1 while the engine process runs and answers.")
        self.load_progress = make.gauge("engine_load_ratio", "Share of the model's weights that is loaded.")
        self.restarts = make.counters(
            "engine_restarts_total",
            "Engine processes started to replace one that ended.",
            reason=(*labels.RESTART_REASONS, labels.OTHER),
        )
        self.requests = steps.gauges(
            "engine_requests", "Requests inside the engine by state.", state=labels.ENGINE_REQUEST_STATES
        )
        self.lora_requests = steps.gauge_grid(
            "engine_lora_requests",
            "Requests inside the engine that run with a LoRA adapter, by adapter and state.",
            adapter=(*sets.adapters, labels.OTHER),
            state=labels.ENGINE_REQUEST_STATES,
        )
        self.step_seconds = steps.histograms(
            "engine_step_seconds", "Duration of a step.", buckets.STEP_SECONDS, kind=labels.STEP_KINDS
        )
        self.step_tokens = steps.histogram("engine_step_tokens", "Tokens computed in a step.", buckets.STEP_TOKENS)
        self.step_requests = steps.histogram(
            "engine_step_requests", "Requests that took part in a step.", buckets.STEP_REQUESTS
        )
        self.phase_seconds = steps.counters(
            "engine_phase_seconds_total", "Time the step loop spent in each phase.", phase=labels.STEP_PHASES
        )
        self.last_step = make.gauge(
            "engine_last_step_timestamp_seconds", "Unix time of the last step; before the first: of the engine's start."
        )
        self.stall_limit = make.gauge(
            "engine_stall_limit_seconds", "Time without a step after which the worker kills an engine with requests."
        )
        self.preemptions = steps.counter(
            "engine_preemptions_total", "Requests whose KV blocks were given to another request."
        )
        self.kv_usage = steps.gauge("kv_cache_usage_ratio", "Share of the KV blocks that requests hold, 0 to 1.")
        self.kv_blocks = steps.gauges("kv_cache_blocks", "KV blocks by state.", state=labels.BLOCK_STATES)
        self.prefix_queried = steps.counter(
            "prefix_cache_queried_tokens_total", "Prompt tokens looked up in the prefix cache."
        )
        self.prefix_hit = steps.counter("prefix_cache_hit_tokens_total", "Prompt tokens found in the prefix cache.")
        self.padded_tokens = steps.counter(
            "engine_padded_tokens_total", "Padding tokens computed to fill the static shapes of the device."
        )
        self.compiled_graphs = steps.gauge(
            "engine_compiled_graphs", "Graphs compiled for static shapes; constant after the warm-up."
        )
        self.fallback_operators = steps.gauge(
            "engine_fallback_operators", "Operators that run on the CPU instead of the device; should be 0."
        )
        self.warm_up_seconds = steps.gauge(
            "engine_warm_up_seconds", "Duration of the compilation of the graphs, before the first request."
        )


class DraftFamilies:
    """Speculative decoding, reported by the engine once per step."""

    def __init__(self, steps: FamilyFactory) -> None:
        self.drafted = steps.counters(
            "draft_tokens_total",
            "Draft tokens of speculative decoding that the model checked, by their position in the draft.",
            position=labels.DRAFT_POSITIONS,
        )
        self.accepted = steps.counters(
            "draft_accepted_tokens_total",
            "Draft tokens that the model accepted, by their position in the draft.",
            position=labels.DRAFT_POSITIONS,
        )


class WorkerFamilies:
    """The worker process itself, and its connection to Redis."""

    def __init__(self, make: FamilyFactory) -> None:
        commands = (*labels.REDIS_COMMANDS, labels.OTHER)
        self.state = make.gauges("worker_state", "1 for the current state of the worker.", state=labels.WORKER_STATES)
        self.slots = make.gauges("worker_slots", "Request slots of the worker.", state=labels.SLOT_STATES)
        self.heartbeat = make.gauge(
            "worker_heartbeat_timestamp_seconds", "Unix time of the last iteration of the worker's event loop."
        )
        self.loop_lag = make.histogram(
            "event_loop_lag_seconds",
            "Longest time in each second for which the worker's event loop was blocked.",
            buckets.LOOP_LAG,
        )
        self.result_seconds = make.counters(
            "worker_result_seconds_total",
            "Time that the worker's event loop spent on detokenizing and on publishing.",
            phase=labels.RESULT_PHASES,
        )
        self.stream_entries = make.counter("stream_entries_total", "Entries written to streams.")
        self.redis_up = make.gauge("redis_up", "1 while the worker reaches Redis.")
        self.redis_seconds = make.histograms(
            "redis_command_seconds", "Round trip of a Redis command.", buckets.REDIS_SECONDS, command=commands
        )
        self.redis_errors = make.counters("redis_errors_total", "Redis commands that failed.", command=commands)
