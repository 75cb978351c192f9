"""Fills the statistics of a step from the statistics of vLLM and of the extended scheduler."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from headrace_engine.core.outputs import StepStats

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.request import Request

    from headrace_engine_vllm.extensions.scheduler import ScheduledStep

FILLED: Final = (
    "step_seconds",
    "kind",
    "num_tokens",
    "num_requests",
    "running",
    "waiting",
    "kv_blocks_used",
    "kv_blocks_free",
    "kv_blocks_total",
    "prefix_queried_tokens",
    "prefix_hit_tokens",
    "preemptions",
    "phase_seconds",
    "admitted_choice_ids",
)
WITH_LORA: Final = ("lora_requests",)
WITH_DRAFTS: Final = ("drafted_per_position", "accepted_per_position")


def add_scheduled(stats: StepStats, steps: "Iterable[ScheduledStep]") -> None:
    """Add the work scheduled since the last outputs. With async scheduling, the outputs belong to an earlier step."""
    num_prefill_tokens, seconds = 0, 0.0
    for step in steps:
        stats.num_tokens += step.num_tokens
        stats.num_requests += step.num_requests
        stats.preemptions += step.num_preempted
        num_prefill_tokens += step.num_prefill_tokens
        seconds += step.seconds
    if num_prefill_tokens:
        stats.kind = "prefill" if num_prefill_tokens == stats.num_tokens else "mixed"
    stats.phase_seconds["schedule"] = seconds


def add_levels(stats: StepStats, theirs: "SchedulerStats", num_blocks: int) -> None:
    """Set the gauges to vLLM's values after its last step."""
    stats.running = theirs.num_running_reqs
    stats.waiting = theirs.num_waiting_reqs + theirs.num_skipped_waiting_reqs
    stats.kv_blocks_total = max(0, num_blocks - 1)  # one of them is the null block
    stats.kv_blocks_used = round(theirs.kv_cache_usage * stats.kv_blocks_total)
    stats.kv_blocks_free = stats.kv_blocks_total - stats.kv_blocks_used


def add_counts(stats: StepStats, theirs: "SchedulerStats") -> None:
    """Set the counters to what vLLM counted in this step."""
    stats.prefix_queried_tokens = theirs.prefix_cache_stats.queries
    stats.prefix_hit_tokens = theirs.prefix_cache_stats.hits
    drafts = theirs.spec_decoding_stats
    if drafts is not None:
        stats.accepted_per_position = list(drafts.num_accepted_tokens_per_pos)
        by_position = getattr(drafts, "num_draft_tokens_per_pos", None)  # the oldest supported versions lack it
        stats.drafted_per_position = list(by_position or [drafts.num_drafts] * drafts.num_spec_tokens)


def add_adapters(stats: StepStats, requests: "Iterable[Request]", running: "Iterable[Request]") -> None:
    """Count the running and the waiting requests of each adapter."""
    run = {request.request_id for request in running}
    for request in requests:
        if request.lora_request is not None:
            counts = stats.lora_requests.setdefault(request.lora_request.lora_name, [0, 0])
            counts[request.request_id not in run] += 1
