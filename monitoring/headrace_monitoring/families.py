"""Every metric family of Headrace, declared once: name, help, labels, buckets.

Names follow the conventions of Prometheus: prefix `headrace_`, base units (seconds, tokens, ratios between 0 and 1),
counters end in `_total`. Every family carries `model`, those of the queue also `queue`. What feeds a family is in
`metrics.py`.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headrace_monitoring import buckets, labels

PREFIX = "headrace_"


class RepeatingHistogram(Histogram):
    """A histogram that takes many equal observations at once."""

    def observe_equal(self, amount: float, count: int, exemplar: dict[str, str] | None = None) -> None:
        """As `observe`, `count` times; at least once."""
        self.observe(amount, exemplar)
        if count > 1:
            self._sum.inc(amount * (count - 1))
            self._buckets[bisect_left(self._upper_bounds, amount)].inc(count - 1)


class FamilyFactory:
    """Declares families with constant labels, and creates all their children at once.

    The keyword arguments of its methods are further labels, each with all values that it can have.
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
        """A counter for every combination of label values."""
        family = Counter(PREFIX + name, documentation, (*self._names, *labels), registry=self._registry)
        return {cell: family.labels(*self._values, *cell) for cell in itertools.product(*labels.values())}

    def gauge(self, name: str, documentation: str) -> Gauge:
        family = Gauge(PREFIX + name, documentation, self._names, registry=self._registry)
        return family.labels(*self._values) if self._names else family

    def gauges(self, name: str, documentation: str, /, **label: Sequence[str]) -> dict[str, Gauge]:
        return {value: child for (value,), child in self.gauge_grid(name, documentation, **label).items()}

    def gauge_grid(self, name: str, documentation: str, /, **labels: Sequence[str]) -> dict[tuple[str, ...], Gauge]:
        """A gauge for every combination of label values."""
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


class QueueFamilies:
    """The backlog in Redis, and what this worker took from it."""

    def __init__(self, make: FamilyFactory, sets: labels.LabelSets) -> None:
        self.messages = make.gauges("queue_messages", "Messages of the queue by state.", state=labels.MESSAGE_STATES)
        self.oldest_age = make.gauge(
            "queue_oldest_message_age_seconds", "Age of the oldest ready message; 0 when none is ready."
        )
        self.blocked = make.gauge("queue_blocked", "1 while Redis gives no messages of the queue to workers.")
        self.wait = make.histograms(
            "queue_wait_seconds",
            "Time for which a message waited in the queue until a worker took it.",
            buckets.QUEUE_WAIT,
            priority=[str(step) for step in sets.priority_steps],
        )
        self.timed = make.counters(
            "queue_timed_messages_total",
            "Messages taken, by the clock that measured their wait.",
            clock=labels.CLOCKS,
        )
        self.received = make.counter("queue_received_messages_total", "Messages this worker took from the queue.")
        self.redelivered = make.counter(
            "queue_redelivered_messages_total", "Messages received that an earlier worker had not finished."
        )
        self.returned = make.counters(
            "queue_returned_messages_total",
            "Messages that this worker gave back to the queue.",
            reason=labels.RETURN_REASONS,
        )
        self.streams_replaced = make.counter(
            "streams_replaced_total", "Streams that no worker can have written; they were deleted and started again."
        )
        self.leases_lost = make.counter("leases_lost_total", "Messages that another worker took; this one was silent.")
        self.dead_lettered = make.counters(
            "queue_dead_lettered_messages_total",
            "Messages moved to the dead letters.",
            reason=(*sets.dead_letter_reasons, labels.OTHER),
        )


class RequestFamilies:
    """What happened to requests, as their subscribers see it."""

    def __init__(self, make: FamilyFactory) -> None:
        self.finished = make.counters(
            "requests_total", "Requests whose stream ended, by outcome.", outcome=labels.OUTCOMES
        )
        self.streams_gone = make.counter(
            "streams_gone_total", "Streams that were deleted, or lost by Redis, under a running request."
        )
        self.resumed_across_draws = make.counter(
            "resumed_across_draws_total",
            "Sampled requests that this worker continued with different draws than their earlier attempts.",
        )
        self.in_flight = make.gauge("requests_in_flight", "Requests this worker started and has not finished.")
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
        self.duration = make.histogram(
            "request_duration_seconds",
            "Time from the enqueue of a request until its stream ended; outcomes stop and length only.",
            buckets.REQUEST_DURATION,
        )
        self.prompt_length = make.histogram(
            "request_prompt_tokens", "Prompt tokens of a request; outcomes stop and length.", buckets.REQUEST_TOKENS
        )
        self.generation_length = make.histogram(
            "request_generation_tokens",
            "Generated tokens of a request; outcomes stop and length.",
            buckets.REQUEST_TOKENS,
        )
        self.prompt_tokens = make.counters(
            "prompt_tokens_total",
            "Prompt tokens of finished requests, by whether they were computed or came from the prefix cache.",
            source=labels.PROMPT_SOURCES,
        )
        self.generation_tokens = make.counter("generation_tokens_total", "Tokens published by this worker.")
        self.time_per_output_token = make.histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a request between two of its tokens; outcomes stop and length only.",
            buckets.INTER_TOKEN_LATENCY,
        )


class StageFamilies:
    """How long each stage of a request in the engine took. `steps` makes the families that an engine's steps report."""

    def __init__(self, make: FamilyFactory, steps: FamilyFactory) -> None:
        self.queue = steps.histogram(
            "engine_queue_seconds", "Time of a request in the engine before its first step.", buckets.ENGINE_STAGE
        )
        self.prefill = steps.histogram(
            "engine_prefill_seconds",
            "Time of a request from its first step until its first token.",
            buckets.ENGINE_STAGE,
        )
        self.decode = make.histogram(
            "engine_decode_seconds",
            "Time of a request from its first to its last token; outcomes stop and length only.",
            buckets.ENGINE_STAGE,
        )


class TenantFamilies:
    """Who sends the work. Only tenants that the operator names have series of their own."""

    def __init__(self, make: FamilyFactory, sets: labels.LabelSets) -> None:
        tenants = sets.tenant_values
        self.requests = make.grid(
            "tenant_requests_total",
            "Requests whose stream ended, by tenant and outcome.",
            tenant=tenants,
            outcome=labels.OUTCOMES,
        )
        self.tokens = make.grid(
            "tenant_tokens_total",
            "Prompt tokens of finished requests and tokens generated for them, by tenant.",
            tenant=tenants,
            kind=labels.TENANT_TOKENS,
        )
        self.queued = make.gauges(
            "tenant_queued_messages", "Ready messages that a worker has sorted, by tenant.", tenant=tenants
        )
        self.queue_wait = make.histograms(
            "tenant_queue_wait_seconds",
            "Time from the enqueue of a message until a worker took it, by tenant.",
            buckets.TENANT_QUEUE_WAIT,
            tenant=tenants,
        )


class EngineFamilies:
    """The step loop and its memory, told by the engine once a step. `steps` makes what not every engine tells."""

    def __init__(self, make: FamilyFactory, steps: FamilyFactory, sets: labels.LabelSets) -> None:
        self.up = make.gauge("engine_up", "1 while the engine process runs and answers.")
        self.restarts = make.counters(
            "engine_restarts_total",
            "Engine processes started to replace one that was lost.",
            reason=(*sets.restart_reasons, labels.OTHER),
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
            "engine_last_step_timestamp_seconds", "Unix time of the last step, or of the engine's start before it."
        )
        self.stall_limit = make.gauge(
            "engine_stall_limit_seconds", "Time without a step after which an engine with work is killed."
        )
        self.preemptions = steps.counter(
            "engine_preemptions_total", "Requests that lost their KV blocks to another request."
        )
        self.kv_usage = steps.gauge("kv_cache_usage_ratio", "Share of the KV blocks that requests hold, 0 to 1.")
        self.kv_blocks = steps.gauges("kv_cache_blocks", "KV blocks by state.", state=labels.BLOCK_STATES)
        self.prefix_queried = steps.counter(
            "prefix_cache_queried_tokens_total", "Prompt tokens looked up in the prefix cache."
        )
        self.prefix_hit = steps.counter("prefix_cache_hit_tokens_total", "Prompt tokens found in the prefix cache.")
        self.padded_tokens = steps.counter(
            "engine_padded_tokens_total", "Tokens computed only to fill a static shape of the device."
        )
        self.compiled_graphs = steps.gauge(
            "engine_compiled_graphs", "Graphs the engine has compiled for static shapes; constant while it serves."
        )
        self.fallback_operators = steps.gauge(
            "engine_fallback_operators", "Operators that were computed on the CPU instead of the device; should be 0."
        )
        self.warm_up_seconds = steps.gauge(
            "engine_warm_up_seconds", "Time the engine took to compile its graphs before the first request."
        )


class DraftFamilies:
    """Speculative decoding, reported by the engine once a step."""

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

    def __init__(self, make: FamilyFactory, sets: labels.LabelSets) -> None:
        commands = (*sets.redis_commands, labels.OTHER)
        self.state = make.gauges("worker_state", "1 for the state the worker is in.", state=labels.WORKER_STATES)
        self.slots = make.gauges("worker_slots", "Request slots of the worker.", state=labels.SLOT_STATES)
        self.heartbeat = make.gauge(
            "worker_heartbeat_timestamp_seconds", "Unix time of the last turn of the worker's loop."
        )
        self.loop_lag = make.histogram(
            "event_loop_lag_seconds",
            "Longest time in each second for which the worker's loop was blocked.",
            buckets.LOOP_LAG,
        )
        self.result_seconds = make.counters(
            "worker_result_seconds_total",
            "Time the worker's loop spent on turning results into text and on publishing them.",
            phase=labels.RESULT_PHASES,
        )
        self.stream_entries = make.counter("stream_entries_total", "Entries written to streams.")
        self.redis_up = make.gauge("redis_up", "1 while the worker reaches Redis.")
        self.redis_seconds = make.histograms(
            "redis_command_seconds", "Round trip of a Redis command.", buckets.REDIS_SECONDS, command=commands
        )
        self.redis_errors = make.counters("redis_errors_total", "Redis commands that failed.", command=commands)
