"""The model and the capabilities that the engine reports in its first frame."""

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm.platforms import current_platform

from headrace_engine.checkpoints.checkpoint import fingerprint, local_folder, tensors_in
from headrace_engine.options.capabilities import STRUCTURED_OUTPUTS, EngineCapabilities, ExactResume
from headrace_engine.options.engine_args_checks import GENERATION_DEFAULTS
from headrace_engine.runner.contracts import ModelInfo
from headrace_engine_vllm import startup
from headrace_engine_vllm.extensions import statistics
from headrace_engine_vllm.versions import draws_name

if TYPE_CHECKING:
    from vllm import LLMEngine

    from headrace_engine.options.config import EngineConfig

logger = logging.getLogger(__name__)

_TEMPERATURES: Final = (0.01, 2.0)
"""Limits of temperatures above 0. vLLM raises lower ones to 0.01 (`vllm.sampling_params._MAX_TEMP`), and refuses those
above 2."""
_V2_TOKEN_IDS: Final = 1024
_V2_STOP_TOKEN_IDS: Final = 128
"""Runner v2 has arrays of these sizes (vllm/v1/worker/gpu/sample/logit_bias.py). More entries would end the engine."""


def model_info(engine: "LLMEngine", config: "EngineConfig") -> ModelInfo:
    model = engine.vllm_config.model_config
    defaults = model.get_diff_sampling_param()
    return ModelInfo(
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        eos_token_ids=startup.eos_token_ids(engine),
        architecture=model.architecture,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(engine.vllm_config.device_config.device_type),
        attention=f"vllm-v{startup.runner_version(engine)}",
        num_parameters=num_parameters(config.model.model, config.model.revision),
        default_sampling_params={name: defaults[name] for name in GENERATION_DEFAULTS.values() if name in defaults},
        weights=fingerprint(config.model.model, config.model.revision),
    )


def capabilities(engine: "LLMEngine", config: "EngineConfig", version: str, exact: ExactResume) -> EngineCapabilities:
    """Return what the engine can do.

    Args:
        exact: the result of `probe.exact_resume`.
    """
    vllm_config = engine.vllm_config
    runner = startup.runner_version(engine)
    drafts = vllm_config.speculative_config is not None
    lora, grammars = config.lora is not None, not config.model.skip_tokenizer_init
    limits: dict[str, Any] = _limits_of_v2() if runner == 2 else {}
    return EngineCapabilities(
        # with drafts, the draws depend on where steps end: that decides whether a draft is accepted
        draws=None if drafts else draws_name(version, runner, current_platform.device_type),
        exact_resume="greedy" if drafts else exact,
        version=version,
        **limits,
        temperature_range=_TEMPERATURES,
        prompt_logprobs=True,
        logprob_token_ids=True,
        structured_outputs=STRUCTURED_OUTPUTS if grammars else (),
        repetition_detection=True,
        min_tokens=True,
        bad_words=True,
        priority=vllm_config.scheduler_config.policy == "priority",
        cache_salt=True,
        lora=lora,
        lora_hot_load=lora,
        logits_processors=False,
        stats=(
            *statistics.FILLED,
            *(statistics.WITH_LORA if lora else ()),
            *(statistics.WITH_DRAFTS if drafts else ()),
        ),
    )


def _limits_of_v2() -> dict[str, Any]:
    from vllm import envs

    return {
        "max_allowed_token_ids": _V2_TOKEN_IDS,
        "max_logit_bias": _V2_TOKEN_IDS,
        "max_stop_token_ids": _V2_STOP_TOKEN_IDS,
        "max_bad_words": envs.VLLM_MAX_NUM_BAD_WORDS,
        "max_bad_words_tokens": envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS,
    }


def num_parameters(model: str, revision: str | None = None) -> int:
    """Count the parameters in the checkpoint. Return 0 if its files cannot be read.

    vLLM's modules cannot be counted: it repacks weights, and each rank has a part of them.
    """
    try:
        return sum(_numbers_in(file) for file in _safetensors(model, revision))
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("the parameters of %s cannot be counted: %s", model, type(error).__name__)
        return 0


def _safetensors(model: str, revision: str | None) -> Iterator[Path]:
    folder = local_folder(model, revision)
    whole = folder / "model.safetensors"
    return iter([whole]) if whole.is_file() else folder.glob("*.safetensors")


def _numbers_in(file: Path) -> int:
    with file.open("rb") as opened:
        return sum(math.prod(tensor["shape"]) for tensor in tensors_in(opened).values())
