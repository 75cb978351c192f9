"""`LoadPlan`: what is decided about a model that generates, and checked, before its weights are read."""

from dataclasses import dataclass
from typing import Any

import torch

from headrace_engine.options.config import ModelConfig
from headrace_engine.runner.linear import packed_linear
from headrace_engine.runner.linear.grouped_weight import FORMATS
from headrace_engine.runner.models import loading, weight_form, weight_memory
from headrace_engine.runner.models.load_errors import permanent_errors
from headrace_engine.runner.models.weight_form import WeightForm


@dataclass(frozen=True, slots=True)
class LoadPlan:
    hf_config: Any
    """The config of transformers."""
    dtype: torch.dtype
    max_model_len: int
    form: WeightForm
    weight_bytes: int
    """Bytes of the weights in memory."""


def plan_load(config: ModelConfig, *, packed: bool, device: torch.device) -> LoadPlan:
    """Read the headers of a model, and decide how it is loaded.

    Args:
        packed, device: as for `PagedModel`.

    Raises:
        ModelLoadError: the model cannot be read, or is not served.
        ConfigError: an option does not fit the model, or its weights do not fit into the free memory.
    """
    hf_config = loading.load_config(config)
    with permanent_errors(config.model, "loaded"):
        computes_bfloat16 = (
            device.type != "cpu"
            or packed_linear.computes_bfloat16()
            or (packed and config.dtype == "auto" and weight_form.multiplies_by_integers(config, hf_config))
        )
    dtype = loading.resolve_dtype(config, hf_config, computes_bfloat16=computes_bfloat16)
    max_model_len = loading.resolve_max_model_len(config, hf_config)
    loading.check_architecture(config, hf_config)
    with permanent_errors(config.model, "loaded"):  # the checks read the headers of the weights
        form = weight_form.weight_form(config, hf_config, dtype, device, compiled=packed)
        weight_bytes = weight_memory.check_weights_fit(
            config.model,
            dtype,
            FORMATS if form is WeightForm.GROUPED else None,
            None if form is WeightForm.TRITON else weight_form.bits_of_integers(config, hf_config),
            widens_float8=form is not WeightForm.TRITON,
        )
    return LoadPlan(hf_config, dtype, max_model_len, form, weight_bytes)
