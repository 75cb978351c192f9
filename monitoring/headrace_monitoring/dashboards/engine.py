"""Engine: what the step loop does, and what its memory holds."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as sdk

from headrace_monitoring.dashboards.expressions import quantile, quantiles, rate
from headrace_monitoring.dashboards.panels import Row, build, graph, latency, share, stack


def dashboard() -> sdk.Dashboard:
    return build(
        "headrace-engine",
        "Headrace: engine",
        "Batch, steps and their phases, KV cache, prefix cache, preemptions, speculative decoding.",
        {"Requests": _requests(), "Steps": _steps(), "Memory": _memory(), "Model": _model()},
    )


def _requests() -> Row:
    return {
        "Requests in the engine": graph(
            "Running in the batch, waiting for KV blocks or a place; and what workers hold in flight.",
            ("sum by (state) (headrace_engine_requests{@})", "{{state}}"),
            ("sum(headrace_requests_in_flight{@})", "in flight"),
        ),
        "Requests with adapters": graph(
            "Requests inside the engine by LoRA adapter; those that wait may wait for their adapter's turn.",
            ("sum by (adapter, state) (headrace_engine_lora_requests{@})", "{{adapter}} {{state}}"),
        ),
        "Tokens by source": graph(
            "Prompt tokens computed or found in the prefix cache, and tokens generated.",
            (rate("prompt_tokens_total", "source"), "prompt {{source}}"),
            (rate("generation_tokens_total"), "generated"),
            unit="suffix: tokens/s",
        ),
        "Engine time to first token": latency(
            "From the start in the engine until the first token: the waiting for a batch and the prefill.",
            "engine_time_to_first_token_seconds",
        ),
        "Engine's queue": latency(
            "Time of a request in the engine before its first step: it waits for KV blocks or a place in the batch.",
            "engine_queue_seconds",
        ),
        "Prefill": latency("Time of a request from its first step until its first token.", "engine_prefill_seconds"),
        "Decode": latency("Time of a request from its first to its last token.", "engine_decode_seconds"),
    }


def _steps() -> Row:
    return {
        "Tokens a step": graph("The size of a batch in tokens.", *quantiles("engine_step_tokens")),
        "Requests a step": graph("The size of a batch in requests.", *quantiles("engine_step_requests")),
        "Step time by kind, p95": graph(
            "Steps that only prefill, only decode, or do both.",
            (quantile(0.95, "engine_step_seconds", "kind"), "{{kind}}"),
            unit="s",
        ),
        "Loop phases": stack(
            "Share of wall time that the step loop of a worker spends in each phase; what is missing to 100% is idle.",
            ("avg by (phase) (rate(headrace_engine_phase_seconds_total{@}[$__rate_interval]))", "{{phase}}"),
            unit="percentunit",
        ),
        "Results": stack(
            "Share of wall time that the worker's own loop, beside the engine, spends on text and on publishing.",
            ("avg by (phase) (rate(headrace_worker_result_seconds_total{@}[$__rate_interval]))", "{{phase}}"),
            unit="percentunit",
        ),
        "Time since the last step": graph(
            "Grows while idle, which is harmless. With requests in flight it means a stalled engine.",
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
            "Held by requests, kept for the prefix cache, and free.",
            ("sum by (state) (headrace_kv_cache_blocks{@})", "{{state}}"),
        ),
        "Preemptions": graph(
            "Requests a second that gave up their KV blocks to another one. More than a few mean too little KV memory.",
            (rate("engine_preemptions_total"), "preemptions"),
            unit="ops",
        ),
        "Prefix cache hit rate": share(
            "Share of the prompt tokens looked up that were found.", (f"{hit} / {queried}", "hit rate")
        ),
    }


def _model() -> Row:
    padded = rate("engine_padded_tokens_total")
    loaded = ("model", "architecture", "dtype", "device", "attention", "engine", "engine_version")
    return {
        "Draft acceptance": share(
            "Speculative decoding: share of the guessed tokens that the model drew itself, in all and by place in the "
            "draft. Where it is low, shorter drafts cost less. Empty without it.",
            (f"{rate('draft_accepted_tokens_total')} / {rate('draft_tokens_total')}", "all"),
            (
                f"{rate('draft_accepted_tokens_total', 'position')} / {rate('draft_tokens_total', 'position')}",
                "place {{position}}",
            ),
        ),
        "Padding of static shapes": share(
            "Devices with static shapes only: share of the computed tokens that only fill a shape. Where it is high, "
            "more buckets would help.",
            (f"{padded} / ({padded} + {rate('engine_step_tokens_sum')})", "padding"),
        ),
        "Compiled graphs": graph(
            "Devices with static shapes only: graphs by worker, constant while it serves; and how many operators ran "
            "on the CPU instead of the device, which must be 0.",
            ("headrace_engine_compiled_graphs{@}", "{{instance}} graphs"),
            ("headrace_engine_fallback_operators{@}", "{{instance}} operators on the CPU"),
        ),
        "Warm-up": graph(
            "Devices with static shapes only: how long the graphs took to compile before the first request, by worker.",
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
