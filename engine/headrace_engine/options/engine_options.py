"""`EngineOptions`: the flat list of engine options as users write them, before any of them is checked.

Most options are declared by topic in `config` and reach the core unchanged. The options that are declared here are
converted first. `EngineArgs` adds the checks. An engine needs only this class to look at the options. Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace_engine.options.config import (
    OWN_ENGINE,
    CacheConfig,
    LoRAOptions,
    ModelOptions,
    SchedulerOptions,
    SchedulingPolicy,
)
from headrace_engine.options.logits_processor import LogitsProcessor
from headrace_engine.options.static_config import StaticOptions
from headrace_wire.option import option


# A dataclass puts the fields of its last base first. It has no slots, so that vars() gives the options.
@dataclass(kw_only=True)
class EngineOptions(StaticOptions, LoRAOptions, SchedulerOptions, CacheConfig, ModelOptions):
    """Named as in vLLM (docs/vllm.md)."""

    engine: str = option(
        OWN_ENGINE,
        "Engine that runs the model: headrace, vllm, or the name of one from another installed package. All but "
        "headrace run in a child process.",
        metavar="NAME",
        none_is_default=True,
    )
    engine_python: str | None = option(
        None,
        "Python interpreter for the engine's process, from an environment with the engine's packages. None: the "
        "interpreter of this process.",
        metavar="PATH",
    )
    engine_args: Mapping[str, Any] = option(
        {},
        'Options of another engine, by its own names: {"gpu_memory_utilization": 0.8}.',
        metavar="JSON",
        none_is_default=True,
    )
    max_num_batched_tokens: int | None = option(
        None,
        "Token budget of one step. None: 512 on a CPU, where larger steps mainly add latency, and 2048 elsewhere; at "
        "least max_num_seqs.",
        metavar="N",
        least=1,
    )
    scheduling_policy: SchedulingPolicy = option(
        "fcfs",
        "Which waiting request runs first: the one that arrived first, or the one with the lowest priority number.",
    )
    logits_processors: Sequence[str | type[LogitsProcessor]] = option(
        (),
        "Import paths of `LogitsProcessor` subclasses, package.module:Class, applied in this order.",
        metavar="PATHS",
        none_is_default=True,
    )
    speculative_config: Mapping[str, Any] | None = option(
        None,
        'Options of speculative decoding: {"method": "ngram", "num_speculative_tokens": 4}. None: off.',
        metavar="JSON",
    )
    spec_method: str | None = option(None, "`method` of speculative_config.")
    spec_model: str | None = option(None, "`model` of speculative_config.")
    spec_tokens: int | None = option(None, "`num_speculative_tokens` of speculative_config.")
    enable_lora: bool = option(False, "Serve LoRA adapters.")
    max_cpu_loras: int | None = option(
        None, "Maximum number of adapters in memory. None: max_loras.", metavar="N", least=1
    )
    kv_cache_memory_bytes: int | None = None
    """This and the next two are vLLM's names, see `vllm_names.RENAMED`."""
    num_gpu_blocks_override: int | None = None
    max_num_queued_reqs: int | None = None
