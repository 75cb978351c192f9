"""Decides in which form the quantised weights of a checkpoint are kept, and lets transformers load them so."""

import copy
import logging
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headrace_engine.checkpoints.checkpoint import is_gguf
from headrace_engine.options.config import ModelConfig
from headrace_engine.runner.linear import grouped_linear, triton_quantised_linear
from headrace_engine.runner.linear.grouped_linear import GroupedLinear
from headrace_engine.runner.linear.triton_quantised_linear import TritonQuantisedLinear
from headrace_engine.runner.models.quantised_loading import MakeLayer, Pack, quantised_weights
from headrace_engine.runner.weights.float_weight import FloatWeight
from headrace_engine.runner.weights.integer_weight import IntegerWeight
from headrace_engine.runner.weights.quantised_checkpoint import reader_for

logger = logging.getLogger(__name__)


class WeightForm(Enum):
    """The form of quantised weights in memory."""

    DENSE = "dequantised"
    GROUPED = "for the compiled kernels of a CPU"
    TRITON = "for the kernels of a GPU"


def weight_form(
    config: ModelConfig, hf_config: Any, dtype: torch.dtype, device: torch.device, *, compiled: bool
) -> WeightForm:
    """Return the form for a model. Logs why a CPU dequantises. The readers' errors pass through.

    Args:
        compiled: take the compiled kernels of a CPU. Otherwise torch and Triton compute, as on a GPU.
    """
    if not _is_quantised(config, hf_config):
        return WeightForm.DENSE
    if not compiled:
        has_kernels = device.type != "cpu" or config.attention_backend == "triton"
        return WeightForm.TRITON if has_kernels and not _is_gguf_file(config) else WeightForm.DENSE
    reason = _reason_to_dequantise(config, dtype)
    if reason is None:
        return WeightForm.GROUPED
    kind = "GGUF file" if _is_gguf_file(config) else "checkpoint"
    logger.warning("the %s is dequantised: %s", kind, reason)
    return WeightForm.DENSE


def loads_in(
    form: WeightForm, config: ModelConfig, hf_config: Any, dtype: torch.dtype, device: torch.device
) -> AbstractContextManager[dict[str, Any]]:
    """Let transformers load quantised weights in a form. Yields arguments of `from_pretrained`.

    Args:
        device: where the model will run.
    """
    quantisation = quantisation_of(hf_config)
    if quantisation is not None:
        packs: dict[WeightForm, Pack] = {
            WeightForm.DENSE: lambda _: None,
            WeightForm.GROUPED: partial(_grouped, dtype=dtype, batch_invariant=config.batch_invariant),
            WeightForm.TRITON: partial(_for_triton, dtype=dtype, device=device),
        }
        return quantised_weights(reader_for(config.model, quantisation), dtype, packs[form])
    if form is not WeightForm.GROUPED:
        return nullcontext({})
    from headrace_engine.runner.models import grouped_loading  # imports gguf, which other models do not need

    return grouped_loading.packed_weights(dtype, batch_invariant=config.batch_invariant)


def _grouped(weight: IntegerWeight | FloatWeight, *, dtype: torch.dtype, batch_invariant: bool) -> MakeLayer | None:
    if not isinstance(weight, IntegerWeight) or not weight.can_stay_packed:
        return None
    return partial(GroupedLinear, [weight.grouped()], dtype=dtype, batch_invariant=batch_invariant)


def _for_triton(weight: IntegerWeight | FloatWeight, *, dtype: torch.dtype, device: torch.device) -> MakeLayer | None:
    quantised = weight.quantised()
    if not triton_quantised_linear.supports(quantised.kind, device):
        return None
    return partial(TritonQuantisedLinear, quantised, dtype=dtype)


def bits_of_integers(config: ModelConfig, hf_config: Any) -> int | None:
    """Return the bits of each weight of a quantised safetensors checkpoint; None if there is no such checkpoint."""
    quantisation = quantisation_of(hf_config)
    return None if quantisation is None else reader_for(config.model, quantisation).bits


def multiplies_by_integers(config: ModelConfig, hf_config: Any) -> bool:
    """Whether most products on a CPU would be by integers in bfloat16. The readers' errors pass through."""
    if not _is_quantised(config, hf_config) or _reason_to_dequantise(config, torch.bfloat16) is not None:
        return False
    from headrace_engine.runner.models import grouped_loading

    return not _is_gguf_file(config) or grouped_loading.is_mostly_packed(config.model)


def quantisation_of(hf_config: Any) -> dict[str, Any] | None:
    """Return the `quantization_config` of config.json."""
    for config in (hf_config, hf_config.get_text_config()):
        found = getattr(config, "quantization_config", None)
        if found:
            own: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
            return own
    return None


def without_quantisation(hf_config: Any) -> Any:
    """Return the config as that of weights that are not quantised: transformers' own quantisers must not see them."""
    if quantisation_of(hf_config) is None:
        return hf_config
    plain = copy.deepcopy(hf_config)
    for config in (plain, plain.get_text_config()):
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    return plain


def _is_gguf_file(config: ModelConfig) -> bool:
    return is_gguf(config.model) and Path(config.model).is_file()


def _is_quantised(config: ModelConfig, hf_config: Any) -> bool:
    return _is_gguf_file(config) or quantisation_of(hf_config) is not None


def _reason_to_dequantise(config: ModelConfig, dtype: torch.dtype) -> str | None:
    if config.quantization is not None:
        return f"its weights become {config.quantization}"
    if not _is_gguf_file(config):
        return grouped_linear.reason_to_dequantise(dtype)
    from headrace_engine.runner.models import grouped_loading  # imports gguf, which other models do not need

    return grouped_loading.reason_to_dequantise(config.model, dtype)
