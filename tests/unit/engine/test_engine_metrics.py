"""The library's metrics of an engine that does not tell every number."""

from __future__ import annotations

from headrace_engine.api.metrics import EngineMetrics
from headrace_engine.core.outputs import STEP_STATS, StepStats

ABOUT_STEPS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_blocks_used",
    "vllm:num_preemptions": "preemptions",
    "vllm:prefix_cache_queries": "prefix_queried_tokens",
    "vllm:prefix_cache_hits": "prefix_hit_tokens",
}


def names(told: tuple[str, ...]) -> set[str]:
    metrics = EngineMetrics("m", told)
    metrics.observe(StepStats(), 3, [])
    return {metric.name for metric in metrics.snapshot(idle=False)}


def test_a_number_that_the_engine_does_not_tell_is_no_metric() -> None:
    everything = names(STEP_STATS)
    assert set(ABOUT_STEPS) <= everything
    assert names(()) == everything - set(ABOUT_STEPS)
    assert names(("running", "preemptions")) - names(()) == {"vllm:num_requests_running", "vllm:num_preemptions"}
