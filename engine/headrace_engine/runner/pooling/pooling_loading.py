"""Loads the transformers model of a pooling folder."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from headrace_engine.checkpoints.pooling_folder import PoolingSpec
from headrace_engine.errors import ConfigError, ModelLoadError
from headrace_engine.options.config import EngineConfig, ModelConfig
from headrace_engine.options.pooling_checks import generation_options
from headrace_engine.runner.models import loading, weight_form, weight_memory
from headrace_engine.runner.models.load_errors import permanent_errors

_TABLES: Final = {
    "none": MODEL_MAPPING,
    "classifier": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "logit_score": MODEL_FOR_CAUSAL_LM_MAPPING,
}


def check_options(config: EngineConfig) -> None:
    """Raise ConfigError, which names every option that a pooling model does not have."""
    model = config.model
    problems = []
    if config.static.tensor_parallel_size > 1:
        problems.append(
            f"tensor_parallel_size is {config.static.tensor_parallel_size}, but models that embed or score run on one "
            "device"
        )
    if model.quantization is not None:
        problems.append(f"quantization is {model.quantization!r}, but models that embed or score are not quantised")
    if model.trust_remote_code:
        problems.append("trust_remote_code is set, but models that embed or score run transformers' own code only")
    problems += generation_options(config)
    if problems:
        raise ConfigError("; ".join(problems))


def model_class(config: ModelConfig, spec: PoolingSpec, hf_config: Any) -> type[PreTrainedModel]:
    """Return the class of transformers for the folder.

    Raises:
        ModelLoadError: transformers has none, or its weights are not served.
    """
    folder = Path(spec.folder)
    if not any(folder.glob("*.safetensors")):
        pickled = next((name for name in ("pytorch_model.bin", "tf_model.h5") if (folder / name).exists()), None)
        if pickled is None:
            raise ModelLoadError(f"model {config.model!r} has no *.safetensors in {spec.folder}")
        raise ModelLoadError(
            f"model {config.model!r} has its weights in {pickled}, which is never loaded: convert it to "
            "model.safetensors, for example with AutoModel.from_pretrained(...).save_pretrained(...)"
        )
    quantisation = weight_form.quantisation_of(hf_config)
    if quantisation is not None:
        method = quantisation.get("quant_method", "an unnamed method")
        raise ModelLoadError(f"model {config.model!r} is quantised with {method}; served are plain safetensors weights")
    if getattr(hf_config, "is_encoder_decoder", False):
        raise ModelLoadError(f"model {config.model!r} is an encoder-decoder ({hf_config.model_type}), not served here")
    # a chain of modules follows the model without its head
    table = _TABLES["none" if spec.modules else spec.head]
    kind: type[PreTrainedModel] | None = table.get(type(hf_config), None)
    if kind is None:
        raise ModelLoadError(
            f"model {config.model!r} is of type {hf_config.model_type!r}, for which transformers has no such model"
        )
    return kind


def load_pooling_model(
    config: ModelConfig,
    kind: type[PreTrainedModel],
    spec: PoolingSpec,
    hf_config: Any,
    dtype: torch.dtype,
    attention: str | None,
) -> PreTrainedModel:
    """Load the model.

    Args:
        attention: the registered name of its attention function. None: the model keeps its own.

    Raises:
        ModelLoadError: a weight is missing, or a file cannot be read.
        ConfigError: the weights do not fit into the free memory.
    """
    options = {} if attention is None else {"attn_implementation": attention}
    transformers_logging.disable_progress_bar()
    with permanent_errors(config.model, "loaded"):
        weight_memory.check_weights_fit(spec.folder, dtype)
        model, report = kind.from_pretrained(
            spec.folder, config=hf_config, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
    # what comes after the hidden states is not computed for an embedding
    missing = sorted(key for key in report["missing_keys"] if not (spec.modules and key.startswith("pooler.")))
    if missing:  # transformers would initialise them at random
        raise ModelLoadError(f"model {config.model!r} lacks {len(missing)} weights, the first is {missing[0]!r}")
    found: PreTrainedModel = model.eval()
    return found


def read_config(config: ModelConfig, spec: PoolingSpec) -> Any:
    """Return the transformers config of the folder. Raises ModelLoadError."""
    return loading.load_config(replace(config, model=spec.folder, revision=None))
