"""Dashboard of the engine: requests, steps, memory and the model."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as sdk

from headrace_monitoring.dashboards.expressions import quantile, quantiles, rate, rate_by
from headrace_monitoring.dashboards.panels import Row, build, graph, latency, share, stack


def dashboard() -> sdk.Dashboard:
    return build(
        "headrace-engine",
        "Headrace: engine",
        "Batch, steps and their phases, KV cache, prefix cache, preemptions, speculative decoding.",
        {"Requests": _requests(), "Inputs": _inputs(), "Steps": _steps(), "Memory": _memory(), "Model": _model()},
    )


def _requests() -> Row:
    return {
        "Requests in the engine": graph(
            "Running in the batch, waiting for KV blocks or a slot, and in flight in the workers.",
            ("sum by (state) (headrace_engine_requests{@})", "{{state}}"),
            ("sum(headrace_requests_in_flight{@})", "in flight"),
        ),
        "Requests with adapters": graph(
            "Requests in the engine by LoRA adapter. Waiting requests may wait until their adapter is loaded.",
            ("sum by (adapter, state) (headrace_engine_lora_requests{@})", "{{adapter}} {{state}}"),
        ),
        "Tokens by source": graph(
            "Prompt tokens computed or found in the prefix cache, and tokens generated.",
            (rate("prompt_tokens_total", "source"), "prompt {{source}}"),
            (rate("generation_tokens_total"), "generated"),
            unit="suffix: tokens/s",
        ),
        "Engine time to first token": latency(
            "From the start in the engine until the first token: the wait for a batch and the prefill.",
            "engine_time_to_first_token_seconds",
        ),
        "Engine's queue": latency(
            "Time of a request in the engine before its first step. It waits for KV blocks or a slot in the batch.",
            "engine_queue_seconds",
        ),
        "Prefill": latency("Time of a request from its first step until its first token.", "engine_prefill_seconds"),
        "Decode": latency("Time of a request from its first to its last token.", "engine_decode_seconds"),
    }


def _inputs() -> Row:
    return {
        "Inputs by task": graph(
            "Models that embed, score or classify: inputs whose row was published.",
            rate_by("pooled_inputs_total", "task"),
            unit="suffix: inputs/s",
        ),
        "Truncated inputs": graph(
            "Those of these inputs that were cut because they were too long. Their rows describe a part of the text.",
            (rate("truncated_inputs_total"), "truncated"),
            unit="suffix: inputs/s",
        ),
    }


def _steps() -> Row:
    return {
        "Tokens a step": graph("The size of a batch in tokens.", *quantiles("engine_step_tokens")),
        "Requests a step": graph("The size of a batch in requests.", *quantiles("engine_step_requests")),
        "Step time by kind, p95": graph(
            "prefill: the step only prefills. decode: it only decodes. mixed: both.",
            (quantile(0.95, "engine_step_seconds", "kind"), "{{kind}}"),
            unit="s",
        ),
        "Loop phases": stack(
            "Share of wall time that the step loop spends in each phase. The rest up to 100% is idle time.",
            ("avg by (phase) (rate(headrace_engine_phase_seconds_total{@}[$__rate_interval]))", "{{phase}}"),
            unit="percentunit",
        ),
        "Results": stack(
            "Share of wall time that the worker's event loop spends on detokenizing and on publishing.",
            ("avg by (phase) (rate(headrace_worker_result_seconds_total{@}[$__rate_interval]))", "{{phase}}"),
            unit="percentunit",
        ),
        "Time since the last step": graph(
            "It grows while the engine is idle. If it grows with requests in flight, the engine is stalled.",
            ("time() - headrace_engine_last_step_timestamp_seconds{@}", "{{instance}}"),
            ("headrace_engine_stall_limit_seconds{@}", "limit: {{instance}}"),
            unit="s",
        ),
    }


def _memory() -> Row:
    hit, queried = rate("prefix_cache_hit_tokens_total"), rate("prefix_cache_queried_tokens_total")
    return {
        "KV cache use": share(
            "Share of the KV blocks that requests hold, by worker.",
            ("headrace_kv_cache_usage_ratio{@}", "{{instance}}"),
        ),
        "KV blocks": stack(
            "used: held by requests. cached: kept for the prefix cache. free: neither.",
            ("sum by (state) (headrace_kv_cache_blocks{@})", "{{state}}"),
        ),
        "Preemptions": graph(
            "Requests a second whose KV blocks were given to another request. Many preemptions mean too few KV blocks.",
            (rate("engine_preemptions_total"), "preemptions"),
            unit="ops",
        ),
        "Prefix cache hit rate": share(
            "Share of the prompt tokens that were found in the prefix cache.", (f"{hit} / {queried}", "hit rate")
        ),
    }


def _model() -> Row:
    padded = rate("engine_padded_tokens_total")
    loaded = ("model", "architecture", "dtype", "device", "attention", "engine", "engine_version")
    return {
        "Draft acceptance": share(
            "Speculative decoding: share of the draft tokens that the model accepted, in total and by position in the "
            "draft. If it is low, use shorter drafts. Empty without speculative decoding.",
            (f"{rate('draft_accepted_tokens_total')} / {rate('draft_tokens_total')}", "all"),
            (
                f"{rate('draft_accepted_tokens_total', 'position')} / {rate('draft_tokens_total', 'position')}",
                "position {{position}}",
            ),
        ),
        "Padding of static shapes": share(
            "Devices with static shapes only: share of the computed tokens that are padding. If it is high, add "
            "buckets.",
            (f"{padded} / ({padded} + {rate('engine_step_tokens_sum')})", "padding"),
        ),
        "Compiled graphs": graph(
            "Devices with static shapes only: compiled graphs by worker, constant after the warm-up. The number of "
            "operators that run on the CPU instead of the device must be 0.",
            ("headrace_engine_compiled_graphs{@}", "{{instance}} graphs"),
            ("headrace_engine_fallback_operators{@}", "{{instance}} operators on the CPU"),
        ),
        "Warm-up": graph(
            "Devices with static shapes only: duration of the compilation before the first request, by worker.",
            ("headrace_engine_warm_up_seconds{@}", "{{instance}}"),
            unit="s",
        ),
        "Workers by model, device and engine": stack(
            "The model as the engine loaded it: architecture, precision, device, attention, engine and its version.",
            (
                f"sum by ({', '.join(loaded)}) (headrace_model_info{{@}})",
                " ".join(f"{{{{{label}}}}}" for label in loaded),
            ),
        ),
    }
