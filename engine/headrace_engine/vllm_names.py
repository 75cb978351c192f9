"""The names of vLLM's interface that Headrace lacks, with what to use instead, and the values that have no effect.

A name that neither Headrace nor these tables have does not exist in vLLM either.
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
"""Engine options of vLLM -> the names that they have here; both are taken."""

_MEDIA = "images, audio and video are not served"
_POOLING = "embeddings, classes and scores are not served, only generated text"
_ONE_MACHINE = "an engine runs on one machine; for more, start more workers on one queue"
_ONE_DEVICE = "an engine uses one device, and tensor_parallel_size on device neuron"
_EXPERTS = "experts are not spread over devices"
_OFFLOADING = "weights and KV blocks stay in the device's memory; set kv_cache_memory_bytes for less KV memory"
_COMPILATION = "the kernels are chosen by the engine; see attention_backend, enforce_eager and batch_invariant"
_METRICS = "metrics are always kept: see LLM.get_metrics, and docs/monitoring.md for the service"
_PROFILING = "use a profiler of your own, such as py-spy or torch.profiler"
_SERVICE = "it is an option of a server; the service's are in docs/deployment.md"
_HUB = "download the model to a folder and give that, or set HF_HOME, HF_TOKEN and HF_HUB_OFFLINE in the environment"
_WEIGHTS = "weights are read from safetensors or GGUF files as they are"
_TRAINING = "weights do not change while an engine runs; make a new one"
_SLEEP = "an engine holds its memory until it is closed; use close() and make a new one"
_PARSERS = "the text is returned as the model wrote it; parse reasoning and tool calls out of it yourself"
_DISAGGREGATION = "an engine computes prompt and output itself"
_SCHEDULER = "the scheduler is fixed; see scheduling_policy, max_num_batched_tokens and long_prefill_token_threshold"

_ARGUMENTS: Final = {
    "tokenization_kwargs": "tokenise the prompt yourself and give prompt_token_ids",
    "mm_processor_kwargs": _MEDIA,
    "prompt_text": "give a map of prompt_token_ids and prompt",
    "trace_headers": "the engine writes no traces; the service does",
    "data_parallel_rank session_id kv_hints": _ONE_MACHINE,
    "reasoning_ended reasoning_parser_kwargs": _PARSERS,
    "reset_running_requests reset_connector": "abort the requests, or wait for them",
    "usage_context": "usage is not reported",
    "stat_loggers": _METRICS,
    "enable_multiprocessing start_engine_loop": "use core_in_process",
    "internal": "requests are aborted by the ids that they were given",
}

_NOT_HERE: Final[Mapping[str, Mapping[str, str]]] = {
    "arguments": _ARGUMENTS,
    "ChatOptions": _ARGUMENTS,
    "RepetitionDetectionParams": {},
    "Logprob": {},
    "EngineArgs": {
        "allowed_* mm_* *_mm_* media_io_kwargs video_* language_model_only io_processor_plugin"
        " renderer_num_workers enable_prompt_embeds ec_*": _MEDIA,
        "pooler_config convert runner task override_pooler_config": _POOLING,
        "distributed_* cpu_distributed_timeout_seconds master_* nnodes node_rank data_parallel_* numa_* ray_*"
        " dp_sync_interval disable_nccl_for_dp_synchronization max_parallel_loading_workers": _ONE_MACHINE,
        "pipeline_parallel_size *context_parallel_size dcp_* cp_* device_ids disable_custom_all_reduce dbo_* enable_dbo"
        " ubatch_size enable_hc_sp enable_shm_tensor_arena enable_batch_sharded_sampling": _ONE_DEVICE,
        "enable_expert_parallel enable_ep_* all2all_backend *elastic_ep* *eplb* expert_* moe_backend"
        " enable_return_routed_experts": _EXPERTS,
        "offload_* cpu_offload_* kv_offloading_* swap_space": _OFFLOADING,
        "gpu_memory_utilization": "set kv_cache_memory_bytes, the bytes of KV memory",
        "compilation_config attention_config kernel_config mamba_* cudagraph_* max_cudagraph_* ir_op_priority"
        " linear_backend sparse_* gdn_* kda_* replayssm_* optimization_level performance_mode"
        " enable_mamba_* enable_gdn_* disable_cascade_attn jit_monitor_* max_seq_len_to_capture engram_config"
        " use_fp64_gumbel fail_on_environ_validation swa_* enable_flashinfer_autotune use_replayssm": _COMPILATION,
        "show_hidden_metrics_for_version otlp_* collect_detailed_traces *_metrics *_metrics_* custom_histogram_buckets"
        " enable_layerwise_* enable_logging_iteration_details": _METRICS,
        "profiler_config": _PROFILING,
        "served_model_name": "it is an option of the worker: headrace worker --served-model-name",
        "shutdown_timeout tokens_only": _SERVICE,
        "download_dir hf_token code_revision hf_config_path model_weights": _HUB,
        "load_format safetensors_* model_loader_extra_config ignore_patterns pt_load_map_location config_format"
        " model_impl": _WEIGHTS,
        "hf_overrides model_class_overrides rope_*": "edit config.json in the model's folder",
        "quantization_config allow_deprecated_quantization calculate_kv_scales": "set quantization='int8', or None",
        "tokenizer_mode": "tokenizers are read by transformers, those with a tokenizer.json",
        "weight_transfer_config enable_trace_replay": _TRAINING,
        "enable_sleep_mode sleep_* enable_cumem_allocator enable_nccl_comm_suspend": _SLEEP,
        "reasoning_*": _PARSERS,
        "logging_config log_*": "set up the logger headrace_engine of Python's logging",
        "structured_outputs_config guided_decoding_backend": "all grammars are compiled by llguidance",
        "kv_transfer_config kv_events_config kv_sharing_fast_prefill": _DISAGGREGATION,
        "*fault_tolerance*": "the service continues requests on another worker: see docs/dependability.md",
        "scheduler_cls scheduler_reserve_full_isl prefill_schedule_interval long_prefill_token_threshold_adaptive"
        " max_num_active_seqs max_num_scheduled_tokens disable_chunked_mm_input enable_chunked_prefill"
        " preemption_mode num_scheduler_steps": _SCHEDULER,
        "prefix_* kv_cache_dtype_skip_layers disable_hybrid_kv_cache_manager disable_sliding_window": "KV blocks are"
        " shared by the hash of all tokens before them; see block_size and enable_prefix_caching",
        "stream_interval": "set it for each request: SamplingParams.stream_interval",
        "logprobs_mode": "log-probabilities are the model's own, before all sampling parameters",
        "return_sampling_mask aux_output_config": "draws are reported by log-probabilities only",
        "watermark_config": "outputs are not watermarked",
        "diffusion_config": "diffusion models are not served",
        "fully_sharded_loras lora_* default_mm_loras enable_tower_connector_lora specialize_active_lora"
        " enable_m*_lora* max_lora_cls_labels enable_prompt_adapter": "see docs/lora.md for what adapters may hold",
        "worker_cls worker_extension_cls additional_config": "the engine takes no classes of yours, except"
        " logits_processors",
        "add_cli_args from_cli_args": "make the options of a command line yourself, and give them as LLM(**vars(args))",
        "create_*_config get_batch_defaults validate_*": "use create_engine_config",
    },
    "SamplingParams": {
        "watermarking": "outputs are not watermarked",
        "prompt_logprob_* logprob_token_ids": "use logprobs and prompt_logprobs",
        "flat_logprobs": "log-probabilities are lists of maps",
        "skip_clone": "parameters are never copied",
        "output_text_buffer_length": "it is no parameter; how much text is held back follows from stop",
        "skip_reading_prefix_cache": "give the prompt a cache_salt of its own",
        "thinking_token_budget": "use max_tokens",
        "routed_experts_prompt_start trace_decode_token_ids": "experts and traces are not returned",
        "best_of use_beam_search early_stopping": "use n, or LLM.beam_search",
        "guided_decoding": "use structured_outputs",
        "logits_processors": "name them when the engine is made, and send their values in extra_args",
        "truncate_prompt_tokens": "cut the prompt yourself and give prompt_token_ids",
        "update_from_* verify for_sampler_warmup sampling_type eos_token_id all_stop_token_ids bad_words_token_ids"
        " num_logprobs": "it is for vLLM's own engine",
    },
    "BeamSearchParams": {
        "structured_outputs": "beam search follows no grammar",
        "skip_special_tokens": "the text shows special tokens",
        "watermarking": "outputs are not watermarked",
    },
    "LoRARequest": {
        "base_model_name": "an adapter is for the engine's model",
        "is_3d_lora_weight": "see docs/lora.md for what adapters may hold",
    },
    "StructuredOutputsParams": {
        "disable_additional_properties": 'say "additionalProperties": false in the schema',
        "structural_tag": "use grammar, which can hold text between forms",
    },
    "LLM": {
        "model_config": "see llm_engine.model_info, which has max_model_len, vocab_size and dtype",
        "encode embed classify score supported_tasks": _POOLING,
        "*weight*": _TRAINING,
        "apply_model collective_rpc": "the model belongs to the core, which may be another process",
        "enqueue enqueue_chat wait_for_completion": "use LLMEngine.add_request and step",
        "start_profile stop_profile": _PROFILING,
        "sleep wake_up release_kv_cache_memory": _SLEEP,
        "reset_mm_cache": _MEDIA,
        "get_world_size": _ONE_DEVICE,
    },
    "LLMEngine": {
        "model_config vllm_config": "see model_info, which has max_model_len, vocab_size and dtype",
        "from_vllm_config": "use from_engine_args",
        "has_unfinished_requests_dp": _ONE_MACHINE,
        "get_supported_tasks": _POOLING,
        "*weight*": _TRAINING,
        "apply_model collective_rpc": "the model belongs to the core, which may be another process",
        "start_profile stop_profile": _PROFILING,
        "sleep wake_up is_sleeping release_kv_cache_memory": _SLEEP,
        "reset_mm_cache reset_encoder_cache": _MEDIA,
        "do_log_stats do_log_stats_with_interval": "use get_metrics",
    },
    "AsyncLLMEngine": {
        "model_config vllm_config": "see model_info, which has max_model_len, vocab_size and dtype",
        "from_vllm_config": "use from_engine_args",
        "encode get_supported_tasks": _POOLING,
        "*weight*": _TRAINING,
        "collective_rpc": "the model belongs to the core, which may be another process",
        "start_profile stop_profile": _PROFILING,
        "sleep wake_up is_sleeping release_kv_cache_memory checkpoint_*": _SLEEP,
        "pause_generation resume_generation is_paused wait_for_requests_to_drain": "use drain, or abort",
        "reset_mm_cache reset_encoder_cache": _MEDIA,
        "do_log_stats is_tracing_enabled": _METRICS,
        "add_request": "use generate, which yields the outputs",
        "check_admission get_num_queued_tokens": "see max_num_queued_requests and max_num_queued_tokens",
        "notify_kv_transfer_request_rejected get_kv_event_sources": _DISAGGREGATION,
        "scale_elastic_ep": _EXPERTS,
        "handle_fault get_status": "use check_health, errored and dead_error",
    },
    "RequestOutput": {
        "encoder_*": "only decoders are served",
        "add": "add up the outputs yourself, or ask for RequestOutputKind.CUMULATIVE",
        "num_cache_creation_tokens": "it is len(prompt_token_ids) - num_cached_tokens",
        "prompt_token_id_logprobs": "use prompt_logprobs",
        "*_transfer_params": _DISAGGREGATION,
    },
    "CompletionOutput": {
        "routed_experts sampling_mask weight_versions": "draws are reported by log-probabilities only",
        "spec_decode_metrics": "see LLM.get_metrics",
    },
    "RequestStateStats": {
        "num_preemptions": "preemptions are counted for the engine, not for a request: see LLM.get_metrics",
        "is_corrupted is_watermarked is_watermark_skipped": "requests with NaN end with an error; none has a watermark",
    },
}
"""By class: names, of which * stands for any text, and the sentence that says what to use."""

WITHOUT_EFFECT: Final = {
    "EngineArgs": (
        "disable_log_stats",
        "enable_log_requests",
        "aggregate_engine_logging",
        "use_tqdm_on_load",
        "core_in_process",  # of AsyncEngineArgs, whose vars() may be given to LLM
    ),
    "SamplingParams": ("skip_clone",),
}
"""Options that are taken whatever they are, since they say nothing about the results."""

_CHANGING_NOTHING: Final[Mapping[str, tuple[Any, ...]]] = {
    "runner task": ("generate",),
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
"""Names -> values, beside None, False, 0, "auto" and what is empty, with which these options ask for nothing."""


def instead_of(topic: str, name: str) -> str | None:
    """What to use instead of a name of vLLM's, None where the name is none of vLLM's."""
    for names, sentence in _NOT_HERE[topic].items():
        if any(fnmatchcase(name, pattern) for pattern in names.split()):
            return sentence
    return None


def asks_for_nothing(topic: str, name: str, value: Any) -> bool:
    """Whether an option that is not here is given a value that changes nothing."""
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
    """The options that are here, and a sentence for each of the others that asks for something."""
    known = set(known)
    served: dict[str, Any] = {}
    problems = []
    for name, value in options.items():
        sentence = instead_of(topic, name)
        if name in known:
            served[name] = value
        elif name in WITHOUT_EFFECT.get(topic, ()) or (sentence and asks_for_nothing(topic, name, value)):
            continue
        elif sentence:
            problems.append(f"{name} is {shown(value)}, but this is not supported: {sentence}")
        else:
            near = difflib.get_close_matches(name, known, 1)
            problems.append(f"{name[:40]!r} is not known" + (f"; did you mean {near[0]}?" if near else ""))
    return served, problems


def refuse_arguments(options: Mapping[str, Any]) -> None:
    """Refuse arguments that a method does not have; those of vLLM's that ask for nothing are passed over.

    Raises:
        InvalidRequestError: naming each, and what to use instead.
    """
    _, problems = served_options("arguments", (), options)
    if problems:
        raise InvalidRequestError(problems)


def with_vllm_names(topic: str, refusal: Callable[[list[str]], Exception]) -> Callable[[type[T]], type[T]]:
    """Decorate a dataclass: an argument that it does not have is refused by a sentence instead of a TypeError.

    Args:
        topic: the class in these tables.
        refusal: makes the error out of the sentences.
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
    """The error of a `__getattr__`: for vLLM's names it says what to use."""
    sentence = instead_of(topic, name)
    return AttributeError(f"{topic} has no {name}" + (f": {sentence}" if sentence else ""))
