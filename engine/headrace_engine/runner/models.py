"""Loading a transformers model so that its attention is ours.

Weights come from safetensors only; nothing is unpickled. A model that does not route its attention through the
attention interface is refused.
"""

import itertools
import logging
import weakref
from typing import Any

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from headrace_engine.config import ModelConfig
from headrace_engine.errors import ConfigError, ModelLoadError
from headrace_engine.runner.attention.backend import AttentionSpec

logger = logging.getLogger(__name__)

_names = itertools.count(1)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_config(config: ModelConfig) -> Any:
    """The model's transformers config. Raises ModelLoadError naming the model."""
    try:
        return AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"model {config.model!r} cannot be read: {error}") from error


def load_weights(config: ModelConfig, hf_config: Any, attention: Any) -> PreTrainedModel:
    """The model with its attention function registered under a name of its own.

    Args:
        attention: a method, called as transformers calls attention functions (`AttentionInterface`).
    """
    name = f"headrace_{next(_names)}"
    AttentionInterface.register(name, _without_holding(attention))
    transformers_logging.disable_progress_bar()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            config.model,
            config=hf_config,
            dtype=resolve_dtype(config, hf_config),
            attn_implementation=name,
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"model {config.model!r} cannot be loaded: {error}") from error
    if not model._supports_attention_backend:
        raise ModelLoadError(
            f"model {config.model!r} is a {type(model).__name__}, whose attention cannot be replaced by a paged one "
            "(transformers' _supports_attention_backend is not set)"
        )
    return model.eval()


def _without_holding(method: Any) -> Any:
    """The same function for a registry that never forgets: it must not keep the method's owner and its model alive."""
    reference = weakref.WeakMethod(method)

    def attend(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        assert alive is not None, "a model outlives its runner"
        return alive(*args, **kwargs)

    return attend


def resolve_dtype(config: ModelConfig, hf_config: Any) -> torch.dtype:
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    own = getattr(hf_config, "dtype", None)
    if isinstance(own, str):
        own = getattr(torch, own, None)
    return own if isinstance(own, torch.dtype) and own in _DTYPES.values() else torch.bfloat16


def resolve_max_model_len(config: ModelConfig, hf_config: Any) -> int:
    limit: int | None = getattr(hf_config, "max_position_embeddings", None)
    if config.max_model_len is None:
        if limit is None:
            raise ConfigError(f"model {config.model!r} states no context length: set max_model_len")
        return limit
    if limit is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len is {config.max_model_len}, but the model's positions end at {limit}")
    return config.max_model_len


def attention_spec(hf_config: Any, block_size: int, dtype: torch.dtype) -> AttentionSpec:
    num_heads: int = hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // num_heads
    return AttentionSpec(
        num_layers=hf_config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=getattr(hf_config, "num_key_value_heads", None) or num_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )


def eos_token_ids(model: PreTrainedModel, hf_config: Any) -> list[int]:
    """End-of-sequence tokens: the generation config's where it names any, else the model config's."""
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        found = hf_config.eos_token_id
    if found is None:
        return []
    return [found] if isinstance(found, int) else list(found)
