"""The names of vLLM's interface that Headrace lacks, and the values with which they ask for nothing.

With these tables an error can say that vLLM has the name, instead of calling it misspelt. docs/vllm.md lists every
name, and what to use instead.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any, Final, TypeVar

from headrace_engine.errors import InvalidRequestError
from headrace_engine.plain_values import shown

T = TypeVar("T")

RENAMED: Final = {
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_blocks",
    "max_num_queued_reqs": "max_num_queued_requests",
}
"""Engine options of vLLM and the names that they have here. Both are accepted."""
_PAGE: Final = "docs/vllm.md says what to use instead"

_ARGUMENTS: Final = (
    "tokenization_kwargs mm_processor_kwargs prompt_text trace_headers data_parallel_rank session_id kv_hints "
    "reasoning_ended reasoning_parser_kwargs reset_running_requests reset_connector usage_context stat_loggers "
    "enable_multiprocessing start_engine_loop internal lora_request chat_template"
)
_NOT_HERE: Final[Mapping[str, str]] = {
    "arguments": _ARGUMENTS,
    "ChatOptions": _ARGUMENTS,
    "RepetitionDetectionParams": "",
    "Logprob": "",
    "EngineArgs": "allowed_* mm_* *_mm_* media_io_kwargs video_* language_model_only io_processor_plugin "
    "renderer_num_workers enable_prompt_embeds ec_* pooler_config convert runner task override_pooler_config "
    "distributed_* cpu_distributed_timeout_seconds master_* nnodes node_rank data_parallel_* numa_* ray_* "
    "dp_sync_interval disable_nccl_for_dp_synchronization max_parallel_loading_workers pipeline_parallel_size "
    "*context_parallel_size dcp_* cp_* device_ids disable_custom_all_reduce dbo_* enable_dbo ubatch_size "
    "enable_hc_sp enable_shm_tensor_arena enable_batch_sharded_sampling enable_expert_parallel enable_ep_* "
    "all2all_backend *elastic_ep* *eplb* expert_* moe_backend enable_return_routed_experts offload_* "
    "cpu_offload_* kv_offloading_* swap_space gpu_memory_utilization compilation_config attention_config "
    "kernel_config mamba_* cudagraph_* max_cudagraph_* ir_op_priority linear_backend sparse_* gdn_* kda_* "
    "replayssm_* optimization_level performance_mode enable_mamba_* enable_gdn_* disable_cascade_attn "
    "jit_monitor_* max_seq_len_to_capture engram_config use_fp64_gumbel fail_on_environ_validation swa_* "
    "enable_flashinfer_autotune use_replayssm show_hidden_metrics_for_version otlp_* collect_detailed_traces "
    "*_metrics *_metrics_* custom_histogram_buckets enable_layerwise_* enable_logging_iteration_details "
    "profiler_config served_model_name shutdown_timeout tokens_only download_dir hf_token code_revision "
    "hf_config_path model_weights load_format safetensors_* model_loader_extra_config ignore_patterns "
    "pt_load_map_location config_format model_impl hf_overrides model_class_overrides rope_* "
    "quantization_config allow_deprecated_quantization calculate_kv_scales tokenizer_mode "
    "weight_transfer_config enable_trace_replay enable_sleep_mode sleep_* enable_cumem_allocator "
    "enable_nccl_comm_suspend reasoning_* logging_config log_* structured_outputs_config "
    "guided_decoding_backend kv_transfer_config kv_events_config kv_sharing_fast_prefill *fault_tolerance* "
    "scheduler_cls scheduler_reserve_full_isl prefill_schedule_interval long_prefill_token_threshold_adaptive "
    "max_num_active_seqs max_num_scheduled_tokens disable_chunked_mm_input enable_chunked_prefill "
    "preemption_mode num_scheduler_steps prefix_* kv_cache_dtype_skip_layers disable_hybrid_kv_cache_manager "
    "disable_sliding_window stream_interval logprobs_mode return_sampling_mask aux_output_config "
    "watermark_config diffusion_config fully_sharded_loras lora_* default_mm_loras "
    "enable_tower_connector_lora specialize_active_lora enable_m*_lora* max_lora_cls_labels "
    "enable_prompt_adapter worker_cls worker_extension_cls additional_config add_cli_args from_cli_args "
    "create_*_config get_batch_defaults validate_*",
    "SamplingParams": "watermarking prompt_logprob_* flat_logprobs skip_clone "
    "output_text_buffer_length skip_reading_prefix_cache thinking_token_budget routed_experts_prompt_start "
    "trace_decode_token_ids "
    "best_of use_beam_search early_stopping guided_decoding logits_processors truncate_prompt_tokens "
    "update_from_* verify for_sampler_warmup sampling_type eos_token_id all_stop_token_ids "
    "bad_words_token_ids num_logprobs",
    "PoolingParams": "normalize softmax activation truncate_prompt_tokens truncation_side step_tag_id "
    "returned_token_ids requires_token_ids task extra_kwargs output_kind skip_reading_prefix_cache "
    "late_interaction_params verify clone",
    "BeamSearchParams": "structured_outputs skip_special_tokens watermarking",
    "LoRARequest": "base_model_name is_3d_lora_weight",
    "StructuredOutputsParams": "disable_additional_properties structural_tag",
    "LLM": "model_config encode supported_tasks *weight* apply_model collective_rpc enqueue "
    "enqueue_chat wait_for_completion start_profile stop_profile sleep wake_up release_kv_cache_memory "
    "reset_mm_cache get_world_size",
    "LLMEngine": "model_config vllm_config from_vllm_config has_unfinished_requests_dp get_supported_tasks *weight* "
    "apply_model collective_rpc start_profile stop_profile sleep wake_up is_sleeping release_kv_cache_memory "
    "reset_mm_cache reset_encoder_cache do_log_stats do_log_stats_with_interval",
    "AsyncLLMEngine": "model_config vllm_config from_vllm_config encode get_supported_tasks *weight* collective_rpc "
    "start_profile stop_profile sleep wake_up is_sleeping release_kv_cache_memory checkpoint_* "
    "pause_generation resume_generation is_paused wait_for_requests_to_drain reset_mm_cache "
    "reset_encoder_cache do_log_stats is_tracing_enabled add_request check_admission get_num_queued_tokens "
    "notify_kv_transfer_request_rejected get_kv_event_sources scale_elastic_ep handle_fault get_status",
    "RequestOutput": "encoder_* add num_cache_creation_tokens prompt_token_id_logprobs *_transfer_params",
    "CompletionOutput": "routed_experts sampling_mask weight_versions spec_decode_metrics",
    "RequestStateStats": "num_preemptions is_corrupted is_watermarked is_watermark_skipped",
}
"""Class -> its names that Headrace lacks. * stands for any text."""

WITHOUT_EFFECT: Final = {
    "EngineArgs": (
        "disable_log_stats",
        "enable_log_requests",
        "aggregate_engine_logging",
        "use_tqdm_on_load",
        "core_in_process",  # AsyncEngineArgs has it, and its vars() may be given to LLM
    ),
    "SamplingParams": ("skip_clone",),
}
"""Options that are accepted with any value, because they do not affect results."""

_CHANGING_NOTHING: Final[Mapping[str, tuple[Any, ...]]] = {
    "runner task": ("generate", "pooling"),
    "convert per_request_spec_decode_metrics mamba_cache_mode": ("none",),
    "master_addr": ("127.0.0.1",),
    "master_port": (29501,),
    "nnodes pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size"
    " dcp_kv_cache_interleave_size data_parallel_size offload_num_in_group offload_prefetch_step"
    " renderer_num_workers prefill_schedule_interval stream_interval": (1,),
    "data_parallel_backend": ("mp",),
    "distributed_executor_backend": ("mp", "uni"),
    "all2all_backend": ("allgather_reducescatter",),
    "expert_placement_strategy": ("linear",),
    "dbo_decode_token_threshold": (32,),
    "dbo_prefill_token_threshold": (512,),
    "dp_sync_interval replayssm_buffer_len": (16,),
    "gpu_memory_utilization": (0.9, 0.92),
    "swap_space mm_processor_cache_gb": (4,),
    "mm_processor_cache_type": ("lru",),
    "mm_hasher_algorithm": ("blake3",),
    "mm_shm_cache_max_object_size_mb": (128,),
    "mm_encoder_tp_mode": ("weights",),
    "mm_encoder_fp8_scale_save_margin": (1.5,),
    "mm_tensor_ipc": ("direct_rpc",),
    "mm_device_do_normalize scheduler_reserve_full_isl swa_bounded_replay": (True,),
    "video_pruning_method": ("evs",),
    "load_format": ("safetensors", "hf"),
    "config_format": ("hf",),
    "model_impl": ("transformers",),
    "tokenizer_mode": ("hf", "fast"),
    "pt_load_map_location": ("cpu",),
    "ignore_patterns": (["original/**/*"],),
    "prefix_caching_hash_algo": ("sha256",),
    "logprobs_mode": ("raw_logprobs",),
    "kv_cache_metrics_sample": (0.01,),
    "jit_monitor_mode": ("warn",),
    "mamba_backend": ("triton",),
    "optimization_level": (2,),
    "performance_mode": ("balanced",),
    "kv_offloading_backend": ("native",),
    "guided_decoding_backend": ("guidance",),
    "structured_outputs_config": ({"backend": "auto"}, {"backend": "guidance"}),
    "max_seq_len_to_capture": (8192,),
}
"""Options -> the values with which they ask for nothing, besides None, False, 0, "auto" and empty values."""


def is_vllms(topic: str, name: str) -> bool:
    """Whether vLLM has this name and Headrace lacks it."""
    return any(fnmatchcase(name, pattern) for pattern in _NOT_HERE[topic].split())


def asks_for_nothing(topic: str, name: str, value: Any) -> bool:
    """Whether an option of vLLM has a value that changes nothing."""
    if name in WITHOUT_EFFECT.get(topic, ()):
        return True
    if name == "enable_chunked_prefill":
        return value is not False
    if value is None or value is False or (isinstance(value, str) and value in ("", "auto")):
        return True
    if isinstance(value, list | tuple | dict | set | frozenset | int | float) and not value:
        return True
    values = (same for names, some in _CHANGING_NOTHING.items() if name in names.split() for same in some)
    return any(type(value) is type(same) and value == same for same in values)


def served_options(topic: str, known: Iterable[str], options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options that Headrace has, and a problem for each unknown option that asks for something."""
    known = set(known)
    served: dict[str, Any] = {}
    problems = []
    for name, value in options.items():
        if name in known:
            served[name] = value
        elif name in WITHOUT_EFFECT.get(topic, ()):
            continue
        elif is_vllms(topic, name):
            if not asks_for_nothing(topic, name, value):
                problems.append(f"{name} is {shown(value)}, but it is not supported: {_PAGE}")
        else:
            near = difflib.get_close_matches(name, known, 1)
            problems.append(f"{name[:40]!r} is not known" + (f"; did you mean {near[0]}?" if near else ""))
    return served, problems


def refuse_arguments(options: Mapping[str, Any]) -> None:
    """Refuse arguments that a method does not have. Ignore vLLM's arguments with values that ask for nothing.

    Raises InvalidRequestError, which names each refused argument.
    """
    _, problems = served_options("arguments", (), options)
    if problems:
        raise InvalidRequestError(problems)


def with_vllm_names(topic: str, refusal: Callable[[list[str]], Exception]) -> Callable[[type[T]], type[T]]:
    """Decorate a dataclass, so that for an unknown argument it raises the error of `refusal` instead of a TypeError.

    Args:
        topic: name of the class in the tables of this module.
        refusal: creates the error from the problems.
    """

    def decorate(kind: type[T]) -> type[T]:
        made = kind.__init__
        known = frozenset(found.name for found in fields(kind))  # type: ignore[arg-type]

        @wraps(made)
        def __init__(self: T, *args: Any, **options: Any) -> None:  # noqa: N807
            if not known.issuperset(options):
                options, problems = served_options(topic, known, options)
                if problems:
                    raise refusal(problems)
            made(self, *args, **options)

        kind.__init__ = __init__  # type: ignore[method-assign, assignment]
        return kind

    return decorate


def missing_attribute(topic: str, name: str) -> AttributeError:
    """Return the error that a `__getattr__` raises for an unknown name."""
    return AttributeError(f"{topic} has no {name}" + (f": {_PAGE}" if is_vllms(topic, name) else ""))
