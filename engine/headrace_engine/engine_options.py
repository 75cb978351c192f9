"""`EngineOptions`: the flat list of engine options as users write them, before any of them is checked.

`EngineArgs` adds the checks. An engine that looks at the options needs no more than this. Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace_engine.config import SchedulingPolicy
from headrace_engine.engine_names import OWN_ENGINE
from headrace_engine.logits_processor import LogitsProcessor


@dataclass(kw_only=True)  # without slots, so that vars() gives the options
class EngineOptions:
    """Named as in vLLM (docs/vllm.md)."""

    model: str = field(default="", kw_only=False)
    engine: str = OWN_ENGINE
    """Name of the engine: headrace, or that of an installed package, which runs in a child process."""
    engine_python: str | None = None
    """Interpreter of the child process, for example of an environment with vLLM. None: that of this process."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Options of another engine that are not in this list."""
    tokenizer: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    skip_tokenizer_init: bool = False
    seed: int | None = None
    dtype: str = "auto"
    """auto, float32 or bfloat16; also float, and torch's dtypes for these. float16 is not supported."""
    device: str = "auto"
    max_model_len: int | None = None
    """None: the limit of the model. -1: as much of it as the KV memory holds."""
    trust_remote_code: bool = False
    attention_backend: str = "auto"
    max_logprobs: int = 20
    logits_processors: Sequence[str | type[LogitsProcessor]] = ()
    quantization: str | None = None
    enforce_eager: bool = False
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    batch_invariant: bool = False
    block_size: int = 32
    kv_cache_dtype: str = "auto"
    kv_cache_memory: int | None = None
    """kv_cache_memory_bytes, vLLM's name, is an alias."""
    num_blocks: int | None = None
    """num_gpu_blocks_override, vLLM's name, is an alias."""
    enable_prefix_caching: bool = True
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    """Token budget of one step. None: 512 on a CPU, where larger steps mainly add latency, and 2048 elsewhere; at least
    max_num_seqs."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    max_num_queued_requests: int | None = None
    max_num_queued_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    async_scheduling: bool = False
    watermark: float = 0.01
    speculative_config: Mapping[str, Any] | None = None
    """Options of `SpeculativeConfig`, such as {"method": "ngram", "num_speculative_tokens": 4}. None: off."""
    spec_method: str | None = None
    """This and the next two are the method, model and num_speculative_tokens of speculative_config."""
    spec_model: str | None = None
    spec_tokens: int | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    """None: max_loras."""
    prefill_buckets: list[int] | None = None
    """This and the next four: see `StaticConfig`."""
    decode_buckets: list[int] | None = None
    context_buckets: list[int] | None = None
    tensor_parallel_size: int = 1
    compile_cache_dir: str | None = None
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    max_num_queued_reqs: int | None = None
