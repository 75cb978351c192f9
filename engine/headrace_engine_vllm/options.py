"""Converts Headrace's options to vLLM's. The parent and the child use it, so it does not import vLLM.

Options with the same meaning in both are in a table. Options that only vLLM has come as `engine_args`, and vLLM itself
checks them. Options that only Headrace has are refused by name.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from headrace_engine.plain_values import shown
from headrace_wire.option import options_of

if TYPE_CHECKING:
    from headrace_engine.options.config import EngineConfig, LoRAConfig
    from headrace_engine.options.engine_args import EngineArgs

LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's LoRAConfig accepts only these maximum ranks."""
GRAMMAR_BACKEND: Final = "guidance"
"""Grammars are checked with this library before a request is queued. vLLM's default may choose another one at the first
request, and keeps it for all later requests."""
_LEFT_OUT: Final = {
    "device": "vLLM computes on the device that it was built for",
    "prefill_buckets": "vLLM chooses the shapes that it compiles",
    "decode_buckets": "vLLM chooses the shapes that it compiles",
    "context_buckets": "vLLM chooses the shapes that it compiles",
    "compile_cache_dir": "vLLM keeps compiled graphs where the environment variable VLLM_CACHE_ROOT says",
    "logits_processors": "vLLM's logits processors have another interface",
}
_OTHER_VALUES: Final = ("block_size", "attention_backend")
"""vLLM has options with these names too, but takes other values."""
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
            "max_num_seqs",  # the slots of the worker
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
    "kv_cache_memory_bytes": "kv_cache_memory",  # `environment.prepare` needs this option
}
"""vLLM's options that Headrace reads too -> the name in Headrace, None if it is the same.

They must be given as Headrace's options, not in `engine_args`.
"""


def problems(args: "EngineArgs") -> list[str]:
    """Return one message for each option that vLLM lacks. The child reports the options that vLLM itself refuses."""
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
            yield f"{name} is {shown(value)}, but vLLM has other values: give it as engine_args {{{name!r}: ...}}"
    if args.quantization == "int8":
        yield (
            "quantization is int8, which only engine headrace has: vLLM finds the method of a quantised checkpoint by "
            "itself, or has others, such as fp8"
        )
    if args.enable_lora and args.max_lora_rank > LORA_RANKS[-1]:
        yield f"max_lora_rank must be at most {LORA_RANKS[-1]} with vLLM, got {args.max_lora_rank}"


def _reserved(engine_args: Mapping[str, Any]) -> Iterator[str]:
    for name, value in engine_args.items():
        if name in _RESERVED:
            yield f"engine_args contains {name}, which cannot be set: {_RESERVED[name]}"
        elif name in _HEADRACES:
            own = _HEADRACES[name] or name
            yield f"engine_args contains {name}, which Headrace reads too: give it as the option {own} instead"
        elif name.startswith("data_parallel_") and (name != "data_parallel_size" or value != 1):
            yield f"engine_args contains {name}, but a worker is one replica: start more workers, which share the queue"
    if engine_args.get("distributed_executor_backend") == "external_launcher":
        yield (
            "engine_args.distributed_executor_backend is external_launcher, which needs a queue for each rank: "
            "use mp or ray"
        )
    structured: object = engine_args.get("structured_outputs_config")
    if structured is not None and not isinstance(structured, Mapping):
        yield f"engine_args.structured_outputs_config must be a map, got {shown(structured)}"
    elif structured and structured.get("backend", GRAMMAR_BACKEND) != GRAMMAR_BACKEND:
        yield (
            f"engine_args.structured_outputs_config.backend is {shown(structured['backend'])}, but Headrace checks "
            f"grammars with {GRAMMAR_BACKEND}: leave it out"
        )


def vllm_options(config: "EngineConfig") -> dict[str, Any]:
    """Return the arguments of `vllm.EngineArgs`: Headrace's options, then `engine_args`, which take precedence."""
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
        "max_logprobs": -1,  # Headrace checks its own limit; `logprob_token_ids` need the whole vocabulary
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
        "async_scheduling": scheduler.async_scheduling or None,  # False is Headrace's default, and lets vLLM decide
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
        # Headrace itself unloads adapters, and loads the new one first: vLLM must have room for one more
        "max_cpu_loras": lora.max_cpu_loras + 1,
    }
