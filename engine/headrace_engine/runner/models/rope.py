"""Fixes rotary embeddings whose frequencies depend on the longest sequence of a batch.

Otherwise the result of a request would depend on longer requests in the same step. The frequencies are chosen once, at
load, for the longest sequence that the engine admits.
"""

import logging
from typing import Any

import torch
from torch import nn

from headrace_engine.errors import ConfigError
from headrace_engine.options.config import ModelConfig

logger = logging.getLogger(__name__)

_FIXED = "fixed"
"""A rope type that transformers does not update."""


def unscaled_length(text_config: Any) -> int | None:
    """Return the length up to which length-dependent scaling does not apply, or None without such scaling."""
    limits = [
        limit
        for parameters in _all_parameters(text_config)
        if (limit := _unscaled_length(parameters, text_config)) is not None
    ]
    return min(limits, default=None)


def _unscaled_length(parameters: dict[str, Any], text_config: Any) -> int | None:
    kind = str(parameters.get("rope_type", "default"))
    if kind == "longrope":
        limit = parameters.get("original_max_position_embeddings")
        return limit or getattr(text_config, "original_max_position_embeddings", None)
    return text_config.max_position_embeddings if "dynamic" in kind else None


def _all_parameters(text_config: Any) -> list[dict[str, Any]]:
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    return [own for own in parameters.values() if isinstance(own, dict)]


def fix_length_dependent_rope(model: nn.Module, config: ModelConfig, max_model_len: int) -> None:
    """Fix every length-dependent rotary embedding of the model for sequences of up to `max_model_len` tokens.

    `longrope` uses the long factors for all requests if a sequence may exceed the original length, otherwise the short
    ones (as in vLLM). `dynamic` has a different base for every length, so it is served only up to the length without
    scaling.

    Raises:
        ConfigError: `max_model_len` exceeds the length from which `dynamic` scaling changes with every token.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _fix(module, config, max_model_len, kinds, None)  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            module.rope_type = {  # type: ignore[assignment]
                layer_type: _fix(module, config, max_model_len, kind, layer_type) for layer_type, kind in kinds.items()
            }


def _fix(module: nn.Module, config: ModelConfig, max_model_len: int, kind: str, layer_type: str | None) -> str:
    if kind != "longrope" and "dynamic" not in kind:
        return kind
    text_config: Any = module.config
    parameters = text_config.rope_parameters if layer_type is None else text_config.rope_parameters[layer_type]
    limit = _unscaled_length(parameters, text_config)
    assert limit is not None
    if max_model_len > limit:
        if kind != "longrope":
            raise ConfigError(
                f"max_model_len is {max_model_len}, but beyond {limit} tokens the dynamic rotary scaling of "
                f"{config.model!r} changes with every token, which is not supported"
            )
        logger.warning(
            "max_model_len %d is beyond the %d tokens of the short rotary factors: all requests use the long ones",
            max_model_len,
            limit,
        )
        # the update of transformers, once, at a position that selects the long factors
        positions = torch.tensor([[limit]])
        module(torch.zeros(1, 1, 1), positions, *([] if layer_type is None else [layer_type]))
    return _FIXED
