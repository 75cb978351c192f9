"""Creates vLLM's engine from Headrace's options: its core in this process, with a scheduler that resumes requests."""

from typing import TYPE_CHECKING, Any

from vllm import LLMEngine
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.executor import Executor

from headrace_engine.checkpoints.checkpoint import pretrained_source
from headrace_engine.errors import ConfigError
from headrace_engine_vllm import versions
from headrace_engine_vllm.environment import remove_stale_memory
from headrace_engine_vllm.errors import startup_errors
from headrace_engine_vllm.extensions.scheduler import resuming
from headrace_engine_vllm.options import vllm_options

if TYPE_CHECKING:
    from vllm.config import PoolerConfig

    from headrace_engine.options.config import EngineConfig


def create_engine(config: "EngineConfig", version: str) -> LLMEngine:
    """Load the model and return vLLM's engine.

    Raises:
        ConfigError: vLLM refuses an option, or the machine has too little memory for the options.
        ModelLoadError: the model cannot be loaded.
    """
    model = config.model.model
    pretrained_source(model)  # raises a clear error for a mistyped path
    _check_lora(config, version)
    with startup_errors(model, "refuses the options"):
        vllm_config = EngineArgs(**vllm_options(config)).create_engine_config()
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    scheduler.scheduler_cls = resuming(scheduler.get_scheduler_cls())
    parallel.worker_extension_cls = (
        "headrace_engine_vllm.extensions.rank.RankExtension"
        if vllm_config.use_v2_model_runner
        else "headrace_engine_vllm.extensions.runner_v1.RankExtensionV1"
    )
    if parallel.world_size > 1 and current_platform.is_cpu():
        remove_stale_memory()
    with startup_errors(model, "cannot start"):
        return LLMEngine(vllm_config, Executor.get_class(vllm_config), log_stats=True, multiprocess_mode=False)


def create_pooling_engine(config: "EngineConfig", pooler: "PoolerConfig | None") -> LLMEngine:
    """Load a model that embeds or classifies, with vLLM's own scheduler. Raises the errors of `create_engine`.

    Args:
        pooler: how hidden states are pooled. None: as vLLM reads the model.
    """
    model = config.model.model
    options = {**vllm_options(config), "runner": "pooling", "pooler_config": pooler}
    if options["enable_prefix_caching"]:
        del options["enable_prefix_caching"]  # vLLM knows which of these models can have it
    with startup_errors(model, "refuses the options"):
        vllm_config = EngineArgs(**options).create_engine_config()
    with startup_errors(model, "cannot start"):
        return LLMEngine(vllm_config, Executor.get_class(vllm_config), log_stats=False, multiprocess_mode=False)


def _check_lora(config: "EngineConfig", version: str) -> None:
    found = versions.minor_version(version)
    if config.lora is None or not current_platform.is_cpu() or found is None:
        return
    first = versions.FIRST_WITH_LORA_ON_CPU
    if found < first:
        raise ConfigError(
            f"enable_lora is set, but on a CPU vLLM {version} applies an adapter to requests without one: "
            f"install vLLM {first[0]}.{first[1]}, or leave enable_lora out"
        )


def runner_version(engine: LLMEngine) -> int:
    """Return which of vLLM's two model runners is used: 1 or 2."""
    return 2 if engine.vllm_config.use_v2_model_runner else 1


def eos_token_ids(engine: LLMEngine) -> list[int]:
    """Return the tokens that end outputs, of the generation config and of the tokenizer."""
    found: Any = engine.input_processor.generation_config_fields.get("eos_token_id")
    ids = {found} if isinstance(found, int) else set(found or ())
    primary = engine.renderer.get_eos_token_id()
    return sorted(ids if primary is None else ids | {primary})
