"""Reads the generation settings of a checkpoint: end tokens, and defaults of sampling parameters."""

import logging
import os
from typing import Any

from transformers import GenerationConfig

from headrace_engine.checkpoints.checkpoint import is_gguf
from headrace_engine.errors import InvalidRequestError, ModelLoadError
from headrace_engine.options.config import ModelConfig
from headrace_engine.options.engine_args_checks import GENERATION_DEFAULTS
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.models.load_errors import permanent_errors

logger = logging.getLogger(__name__)


def read_generation_config(config: ModelConfig, own: GenerationConfig | None) -> GenerationConfig | None:
    """Return the generation config that the options name. `own` is the model's config. Raises ModelLoadError."""
    if config.generation_config in ("auto", "vllm"):
        return own
    folder = config.generation_config
    if not os.path.isdir(folder):  # noqa: PTH112  # False for an invalid path too
        raise ModelLoadError(
            f"generation_config is {folder!r}, and there is no such folder; give auto, vllm or a folder that holds "
            "generation_config.json"
        )
    with permanent_errors(folder, "read", what="generation_config"):
        return GenerationConfig.from_pretrained(folder)


def eos_token_ids(generation: GenerationConfig | None, hf_config: Any, model: str) -> list[int]:
    """Return the end tokens of the generation config, or of the model config if the generation config names none.

    A GGUF file adds its own end tokens.

    A token outside the vocabulary can never be drawn. It is ignored with a warning.
    """
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(hf_config, "eos_token_id", None)
    named = list(found) if isinstance(found, list | tuple) else [] if found is None else [found]
    if is_gguf(model):
        from headrace_engine.checkpoints.gguf_reader import (
            end_token_ids,  # imports gguf, which other models do not need
        )

        named += end_token_ids(model)
    size = hf_config.get_text_config().vocab_size
    known = [token_id for token_id in named if type(token_id) is int and 0 <= token_id < size]
    if len(known) < len(named):
        foreign = [token_id for token_id in named if token_id not in known]
        logger.warning("eos_token_id %s ignored: the vocabulary ends at %d", foreign, size - 1)
    return list(dict.fromkeys(known))


def default_sampling_params(config: ModelConfig, generation: GenerationConfig | None) -> dict[str, Any]:
    """Return the defaults of sampling parameters from `generation_config` and its override.

    A value that `SamplingParams` refuses is ignored with a warning.
    """
    named: dict[str, Any] = {}
    if config.generation_config != "vllm" and generation is not None:
        named = generation.to_diff_dict()
    named |= config.override_generation_config
    defaults: dict[str, Any] = {}
    for name, parameter in GENERATION_DEFAULTS.items():
        value = named.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{parameter: value})
        except InvalidRequestError as error:
            logger.warning("generation_config: %s ignored: %s", name, error)
        else:
            defaults[parameter] = value
    if defaults:
        logger.info("default sampling parameters of the generation config: %s", defaults)
    return defaults


def drop_foreign_pad_token(hf_config: Any) -> None:
    """Remove a padding token outside the vocabulary: no embedding can be created with it. It is not used."""
    for config in {id(found): found for found in (hf_config, hf_config.get_text_config())}.values():
        token_id, size = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
        if token_id is not None and size is not None and not 0 <= token_id < size:
            logger.warning("pad_token_id %s ignored: the vocabulary ends at %d", token_id, size - 1)
            config.pad_token_id = None
