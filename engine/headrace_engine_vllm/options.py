"""Headrace's options as vLLM's. Pure: imports no vLLM, and is used by the parent and by the child.

What has one meaning in both is in the table; what has a name in vLLM alone comes as `engine_args` and is refused, where
it is wrong, by vLLM itself. Options of Headrace that vLLM has not are refused by name.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from headrace_engine.option import options_of
from headrace_engine.plain_values import shown

if TYPE_CHECKING:
    from headrace_engine.config import EngineConfig, LoRAConfig
    from headrace_engine.engine_args import EngineArgs

LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's LoRAConfig takes these maximum ranks only."""
GRAMMAR_BACKEND: Final = "guidance"
"""The library that the door checks grammars with. vLLM's default may take another one for a process's first request,
and keeps it for all later ones."""
_LEFT_OUT: Final = {
    "device": "vLLM computes on the device that it was built for",
    "prefill_buckets": "vLLM chooses the shapes that it compiles",
    "decode_buckets": "vLLM chooses the shapes that it compiles",
    "context_buckets": "vLLM chooses the shapes that it compiles",
    "compile_cache_dir": "vLLM keeps compiled graphs where the environment variable VLLM_CACHE_ROOT says",
    "logits_processors": "vLLM's have another interface",
}
_OTHER_VALUES: Final = ("block_size", "attention_backend")
"""vLLM has options of these names with values of its own."""
_RESERVED: Final = {
    "scheduler_cls": "Headrace resumes requests in a scheduler of its own",
    "worker_extension_cls": "Headrace resumes requests in an extension of its own",
    "disable_log_stats": "Headrace's metrics come from these statistics",
    "reasoning_parser": "Headrace's gateway separates the reasoning, and grammars resume from the first token",
    "logprobs_mode": "Headrace's log-probabilities are those of the raw logits",
    "reasoning_config": "Headrace's gateway separates the reasoning, and grammars resume from the first token",
}
_HEADRACES: Final = {
    **dict.fromkeys(
        (
            "model",
            "tokenizer",
            "revision",
            "tokenizer_revision",
            "skip_tokenizer_init",
            "trust_remote_code",
            "dtype",  # chooses the default model's weights
            "max_num_seqs",  # feeds the queue's credit
            "enable_prefix_caching",  # without it, tenants' prefixes need not be kept apart
            "max_logprobs",
            "scheduling_policy",
            "generation_config",
            "override_generation_config",
            "enable_lora",
            "max_loras",
            "max_lora_rank",
            "max_cpu_loras",
        )
    ),
    "kv_cache_memory_bytes": "kv_cache_memory",  # takes VLLM_CPU_KVCACHE_SPACE away, which would win
}
"""Read by Headrace, too, so that they must be given as Headrace's options; their names there, where these differ."""


def problems(args: "EngineArgs") -> list[str]:
    """What vLLM has not, one sentence each; what vLLM itself refuses is told by the child."""
    return [*_unknown_to_vllm(args), *_reserved(args.engine_args)]


def _unknown_to_vllm(args: "EngineArgs") -> Iterator[str]:
    defaults = {found.name: found.default for found in options_of(type(args))}
    for name, reason in _LEFT_OUT.items():
        value = getattr(args, name)
        if value and value != defaults[name]:
            yield f"{name} is {shown(value)}, but {reason}: leave {name} out"
    for name in _OTHER_VALUES:
        value = getattr(args, name)
        if value != defaults[name]:
            yield f"{name} is {shown(value)}, but vLLM has values of its own: give it as engine_args {{{name!r}: ...}}"
    if args.quantization == "int8":
        yield (
            "quantization is int8, which only engine headrace has: vLLM finds the method of a quantised checkpoint by "
            "itself, or has others, such as fp8"
        )
    if args.enable_lora and args.max_lora_rank > LORA_RANKS[-1]:
        yield f"max_lora_rank is {args.max_lora_rank}, but vLLM's largest is {LORA_RANKS[-1]}"


def _reserved(engine_args: Mapping[str, Any]) -> Iterator[str]:
    for name, value in engine_args.items():
        if name in _RESERVED:
            yield f"engine_args holds {name}, which is not open: {_RESERVED[name]}"
        elif name in _HEADRACES:
            own = _HEADRACES[name] or name
            yield f"engine_args holds {name}, which Headrace reads, too: give it as {own} beside engine_args"
        elif name.startswith("data_parallel_") and (name != "data_parallel_size" or value != 1):
            yield f"engine_args holds {name}, but a worker is one replica: start more workers, which share the queue"
    if engine_args.get("distributed_executor_backend") == "external_launcher":
        yield "engine_args.distributed_executor_backend is external_launcher, which needs a queue a rank: use mp or ray"
    structured: object = engine_args.get("structured_outputs_config")
    if structured is not None and not isinstance(structured, Mapping):
        yield f"engine_args.structured_outputs_config is {shown(structured)}, expected a map"
    elif structured and structured.get("backend", GRAMMAR_BACKEND) != GRAMMAR_BACKEND:
        yield (
            f"engine_args.structured_outputs_config.backend is {shown(structured['backend'])}, but Headrace checks "
            f"grammars with {GRAMMAR_BACKEND}: leave it out"
        )


def vllm_options(config: "EngineConfig") -> dict[str, Any]:
    """Arguments of `vllm.EngineArgs`: the table, and the engine_args laid over it."""
    model, cache, scheduler = config.model, config.cache, config.scheduler
    wanted = {
        "model": model.model,
        "tokenizer": model.tokenizer,
        "revision": model.revision,
        "tokenizer_revision": model.tokenizer_revision,
        "skip_tokenizer_init": model.skip_tokenizer_init or None,
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "trust_remote_code": model.trust_remote_code,
        "max_logprobs": model.max_logprobs,
        "quantization": model.quantization,
        "enforce_eager": model.enforce_eager or None,
        "generation_config": model.generation_config,
        "override_generation_config": model.override_generation_config or None,
        "kv_cache_dtype": None if cache.kv_cache_dtype == "auto" else cache.kv_cache_dtype,
        "kv_cache_memory_bytes": cache.kv_cache_memory,
        "num_gpu_blocks_override": cache.num_blocks,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens or None,
        "scheduling_policy": scheduler.policy,
        "long_prefill_token_threshold": scheduler.long_prefill_token_threshold,
        "watermark": scheduler.watermark,
        "async_scheduling": scheduler.async_scheduling or None,  # False is Headrace's default: vLLM decides
        "tensor_parallel_size": config.static.tensor_parallel_size,
        "speculative_config": config.speculative_options,
        "use_tqdm_on_load": False,
    }
    options = {name: value for name, value in wanted.items() if value is not None}
    if config.lora is not None:
        options |= _lora_options(config.lora)
    given = dict(config.engine_args)
    structured = {**(given.pop("structured_outputs_config", None) or {}), "backend": GRAMMAR_BACKEND}
    return {**options, **given, "structured_outputs_config": structured}


def _lora_options(lora: "LoRAConfig") -> dict[str, Any]:
    return {
        "enable_lora": True,
        "max_loras": lora.max_loras,
        "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= lora.max_lora_rank),
        # Headrace drops adapters by itself, and reads the new one first: vLLM must not drop one for lack of room
        "max_cpu_loras": lora.max_cpu_loras + 1,
    }
