"""Loads quantised safetensors checkpoints: linear layers get the integers of the files.

transformers builds the model and loads all other tensors. Its own quantisers are not used: they dequantise on a CPU, or
need a GPU or packages of their own.
"""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, auto
from transformers.utils.quantization_config import QuantizationConfigMixin

from headrace_engine.errors import ModelLoadError
from headrace_engine.runner.linear.prepared_linear import QuantisedLinear
from headrace_engine.runner.memory import release_unused
from headrace_engine.runner.weights.float_weight import FloatWeight
from headrace_engine.runner.weights.integer_weight import IntegerWeight
from headrace_engine.runner.weights.module_tensors import ModuleTensors
from headrace_engine.runner.weights.quantised_checkpoint import WeightReader, quantised_modules
from headrace_engine.system.load_progress import with_progress

logger = logging.getLogger(__name__)

MakeLayer = Callable[[nn.Parameter | None], QuantisedLinear]
"""Makes a layer with a bias."""
Pack = Callable[[IntegerWeight | FloatWeight], MakeLayer | None]

_METHOD: Final = "headrace"
_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32)
_RELEASE_AFTER: Final = 64 << 20  # bytes that are packed before the pages of the files are released


@contextmanager
def quantised_weights(reader: WeightReader, dtype: torch.dtype, pack: Pack) -> Iterator[dict[str, Any]]:
    """Let transformers' `from_pretrained` load a quantised checkpoint. Yields arguments for it.

    Args:
        pack: brings a weight into its form in memory. Returns None for a weight that is to be dequantised.
    """

    class Loader(HfQuantizer):
        """Reads the quantised weights before transformers loads the others."""

        def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
            self._layers = _Layers(model, dtype, pack)
            files = kwargs["checkpoint_files"]
            with torch.device("cpu"), quantised_modules(files, reader.marks) as modules:  # the model is on meta
                for each in with_progress(modules, len(modules)):
                    self._layers.take(each, reader)
                names = "|".join(re.escape(each.module) for each in modules)
            model._keys_to_ignore_on_load_unexpected = {rf"^({names})\."}  # otherwise transformers warns of them
            self._layers.warn()

        def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
            self._layers.fill()
            del model.config.quantization_config

        def is_serializable(self) -> bool:
            return False

        @property
        def is_trainable(self) -> bool:
            return False

    auto.AUTO_QUANTIZER_MAPPING[_METHOD] = Loader
    try:
        yield {"quantization_config": QuantizationConfigMixin(quant_method=_METHOD)}
    finally:
        del auto.AUTO_QUANTIZER_MAPPING[_METHOD]


class _Layers:
    """The linear layers of a model without weights, which get those of a checkpoint."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, pack: Pack) -> None:
        self._model = model
        self._dtype = dtype
        self._pack = pack
        self._packed: dict[str, MakeLayer] = {}
        self._dense: dict[str, torch.Tensor] = {}
        self._sizes: set[int] = set()
        self._read = 0

    def take(self, tensors: ModuleTensors, reader: WeightReader) -> None:
        """Give a layer the weight of a module of the checkpoint."""
        name = self._name_of(tensors)
        layer: Any = self._model.get_submodule(name)
        weight = reader.read(tensors, layer.out_features, layer.in_features)
        if layer.bias is None and "bias" in tensors and bool(tensors.get("bias", *_FLOATS).any()):  # GPTQ writes zeros
            raise tensors.error("bias", "is not zero, but the layer of the model has no bias")
        del layer.weight  # transformers would miss it in the files
        packed = self._pack(weight)
        if packed is None:
            self._keep_dense(name, weight)
        else:
            self._packed[name] = packed
        self._read += layer.out_features * layer.in_features
        if self._read > _RELEASE_AFTER:
            self._read = 0
            release_unused()

    def _name_of(self, tensors: ModuleTensors) -> str:
        for name in (tensors.module, f"{self._model.base_model_prefix}.{tensors.module}"):
            try:
                module = self._model.get_submodule(name)
            except AttributeError:
                continue
            if type(module) is nn.Linear:
                return name
        raise ModelLoadError(
            f"module '{tensors.module}' is quantised in the checkpoint, but is no linear layer of a "
            f"{type(self._model).__name__}: quantised experts and embeddings are not served"
        )

    def _keep_dense(self, name: str, weight: IntegerWeight | FloatWeight) -> None:
        self._dense[name] = weight.dense(self._dtype)
        if isinstance(weight, IntegerWeight) and not weight.can_stay_packed:
            self._sizes.add(weight.group)

    def warn(self) -> None:
        """Log what does not stay packed, with its memory."""
        if self._dense:
            size = sum(weight.nbytes for weight in self._dense.values()) / 2**20
            sizes = ", ".join(map(str, sorted(self._sizes)))
            why = f": packed stay groups of a multiple of 32 inputs, these have {sizes}" if sizes else ""
            logger.warning("%d linear layers are dequantised, to %.0f MiB%s", len(self._dense), size, why)

    def fill(self) -> None:
        """Set the weights, once the biases are loaded. transformers would overwrite the buffers of a layer before."""
        for name, make_layer in self._packed.items():
            parent, _, child = name.rpartition(".")
            setattr(self._model.get_submodule(parent), child, make_layer(self._model.get_submodule(name).bias))
        for name, weight in self._dense.items():
            layer: Any = self._model.get_submodule(name)
            layer.weight = nn.Parameter(weight, requires_grad=False)
