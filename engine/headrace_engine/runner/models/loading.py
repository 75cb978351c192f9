"""Loads a transformers model with Headrace's attention function.

Weights come from safetensors or GGUF only; nothing is unpickled. A model whose attention does not use the attention
interface of transformers is refused.
"""

import itertools
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from headrace_engine.checkpoints.checkpoint import is_gguf, pretrained_source, quick_reads, unreadable
from headrace_engine.errors import ConfigError, ModelLoadError
from headrace_engine.options.config import FITTING_LENGTH, ModelConfig
from headrace_engine.runner.models import generation, rope
from headrace_engine.runner.models.load_errors import permanent_errors
from headrace_engine.runner.models.weight_form import WeightForm, loads_in, quantisation_of, without_quantisation
from headrace_engine.runner.weights.quantised_checkpoint import reader_for
from headrace_engine.system.load_progress import tqdm_hook

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_names = itertools.count(1)
_RECURRENT_LAYERS = {"conv", "linear_attention", "hybrid", "hybrid_sliding"}
"""Names in `layer_types` of layers that keep their state in transformers' `LinearAttentionLayer`."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_config(config: ModelConfig) -> Any:
    """Return the transformers config of the model. Raises ModelLoadError that names the model."""
    with permanent_errors(config.model, "read", unreadable), quick_reads(config.model):
        source, options = pretrained_source(config.model, config.revision)
        if is_gguf(config.model):
            from headrace_engine.checkpoints.gguf_checks import check_header  # imports gguf

            check_header(config.model)
        hf_config = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code, **options)
    generation.drop_foreign_pad_token(hf_config)
    return hf_config


def load_weights(
    config: ModelConfig,
    hf_config: Any,
    dtype: torch.dtype,
    attention: Any,
    *,
    form: WeightForm = WeightForm.DENSE,
    device: torch.device = _CPU,
) -> PreTrainedModel:
    """Load the model, and register its attention function under a unique name.

    Args:
        attention: a method with the signature of an attention function of transformers (`AttentionInterface`).
        form: of quantised weights.
        device: where the model will run. It is loaded on the CPU.
    """
    name = register_attention(attention)
    transformers_logging.disable_progress_bar()
    logger.info("reading the weights of %s", config.model)
    source, options = pretrained_source(config.model, config.revision)
    model: PreTrainedModel
    with (
        permanent_errors(config.model, "loaded"),
        quick_reads(config.model),
        loads_in(form, config, hf_config, dtype, device) as quantisation,
        _progress_in_log(is_needed=form is not WeightForm.GROUPED and not quantisation),
    ):
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            config=without_quantisation(hf_config),
            dtype=dtype,
            attn_implementation=name,
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below: transformers' error does not name the tensors
            **options,
            **quantisation,
        )
    for tensor, found, expected in sorted(report["mismatched_keys"]):
        raise ModelLoadError(
            f"model {config.model!r} cannot be loaded: tensor {tensor!r} has the size {list(found)}, but the "
            f"configuration needs {list(expected)}: fetch or convert the model again"
        )
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would initialise them at random
        raise ModelLoadError(
            f"model {config.model!r} lacks {len(missing)} weights, the first is {missing[0]!r}: "
            "fetch or convert it again"
        )
    _check_class(config, type(model), hf_config)  # code from the folder of the model is loaded only now
    return model.eval()


@contextmanager
def _progress_in_log(*, is_needed: bool) -> Iterator[None]:
    """Log the progress of transformers. It is not needed where our own readers load most of the weights, and log it."""
    before = transformers_logging.set_tqdm_hook(tqdm_hook if is_needed else None)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def register_attention(method: Any, *, is_compiled: bool = False) -> str:
    """Register a method with the signature of an attention function of transformers. Return its unique name.

    Args:
        is_compiled: torch.compile traces the method, and cannot trace a weak reference. The registry then keeps its
            object for good.
    """
    name = f"headrace_{next(_names)}"
    AttentionInterface.register(name, method if is_compiled else _without_holding(method))
    return name


def check_architecture(config: ModelConfig, hf_config: Any) -> None:
    """Refuse an unsupported architecture before any weight is read.

    Raises:
        ModelLoadError: the model is not a decoder, its attention cannot be paged, or it is quantised in a way that is
            not served.
    """
    quantisation = quantisation_of(hf_config)
    if quantisation is not None:
        reader_for(config.model, quantisation)
    if getattr(hf_config, "is_encoder_decoder", False):
        raise ModelLoadError(
            f"model {config.model!r} is an encoder-decoder ({hf_config.model_type}); only decoders are served, "
            "as cross attention has no paged form here"
        )
    if getattr(hf_config.get_text_config(), "attention_chunk_size", None):
        raise ModelLoadError(
            f"model {config.model!r} ({hf_config.model_type}) attends in chunks (attention_chunk_size), which paged "
            "attention does not support"
        )
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    if kind is not None:
        _check_class(config, kind, hf_config)
    elif not config.trust_remote_code:
        raise ModelLoadError(
            f"model {config.model!r} is of type {hf_config.model_type!r}, which is not a decoder that transformers "
            "supports"
        )


def _check_class(config: ModelConfig, kind: type[PreTrainedModel], hf_config: Any) -> None:
    if is_hybrid(hf_config):
        return  # the check of the loaded model sees whether its attention can be replaced
    if kind._is_stateful:
        raise ModelLoadError(
            f"model {config.model!r} is a {kind.__name__}, which keeps a recurrent state of another kind than "
            "convolutions and linear attention beside layers of attention"
        )
    if not kind._supports_attention_backend:
        raise ModelLoadError(
            f"model {config.model!r} is a {kind.__name__}, whose attention cannot be replaced by a paged one "
            "(transformers' _supports_attention_backend is not set)"
        )


def is_hybrid(hf_config: Any) -> bool:
    """Whether the model has recurrent layers of transformers' common kinds, and others."""
    kinds = set(getattr(hf_config.get_text_config(), "layer_types", None) or ())
    return bool(kinds & _RECURRENT_LAYERS) and kinds != {"linear_attention"}


def _without_holding(method: Any) -> Any:
    """Wrap a method for a registry without removal, so that it does not keep the model alive."""
    reference = weakref.WeakMethod(method)

    def attend(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        assert alive is not None, "a model outlives its runner"
        return alive(*args, **kwargs)

    return attend


def resolve_dtype(config: ModelConfig, hf_config: Any, *, computes_bfloat16: bool = True) -> torch.dtype:
    """Return the type of the weights: the option's, or the checkpoint's, or bfloat16 if that type is not supported.

    Args:
        computes_bfloat16: whether the device computes the model faster in bfloat16 than in float32. If not, the
            default is float32.
    """
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if not computes_bfloat16:
        return torch.float32
    own = getattr(hf_config, "dtype", None) or getattr(hf_config.get_text_config(), "dtype", None)
    if isinstance(own, str):
        own = getattr(torch, own, None)
    return own if isinstance(own, torch.dtype) and own in _DTYPES.values() else torch.bfloat16


def resolve_max_model_len(config: ModelConfig, hf_config: Any) -> int:
    """Return the option, or by default the model's limit, without the part that needs length-dependent scaling."""
    text_config = hf_config.get_text_config()
    limit: int | None = getattr(text_config, "max_position_embeddings", None)
    if config.max_model_len is None or config.max_model_len == FITTING_LENGTH:
        if limit is None:
            raise ConfigError(f"model {config.model!r} states no context length: set max_model_len")
        unscaled = rope.unscaled_length(text_config)
        if unscaled is not None and unscaled < limit:
            logger.warning(
                "max_model_len is %d, up to which the model needs no scaled positions; set it for up to %d",
                unscaled,
                limit,
            )
            return unscaled
        return limit
    if limit is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len must be at most {limit}, the model's positions, got {config.max_model_len}")
    return config.max_model_len
