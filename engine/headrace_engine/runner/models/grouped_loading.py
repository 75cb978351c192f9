"""Loads GGUF files without dequantising their matrices: linear layers and embeddings keep the blocks of the file.

transformers builds the model, maps names, and loads all other tensors. It is given a reader that does not show the
tensors that are packed here. Not packed are: types without a kernel, weights of other modules, and weights that
transformers changes in another way than in the order of rows.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
from transformers.quantizers import auto

from headrace_engine.checkpoints.gguf_reader import header_for_transformers, read_header
from headrace_engine.errors import ModelLoadError
from headrace_engine.runner.linear import grouped_linear
from headrace_engine.runner.linear.grouped_linear import GroupedLinear, replace_embedding
from headrace_engine.runner.linear.grouped_weight import FORMATS, BadScaleError, GroupedWeight
from headrace_engine.runner.memory import release_pages
from headrace_engine.system.load_progress import with_progress

logger = logging.getLogger(__name__)

_FLOATS = {"F32", "F16", "BF16", "F64"}


def reason_to_dequantise(path: str, dtype: torch.dtype) -> str | None:
    """Return why the blocks of a GGUF file cannot be kept; None if they can. The reader's errors pass through."""
    reason = grouped_linear.reason_to_dequantise(dtype)
    if reason is not None:
        return reason
    if "gguf" not in auto.AUTO_QUANTIZER_MAPPING:
        return "this version of transformers cannot leave tensors out"
    from transformers.integrations.gguf.utils import is_gguf_arch_supported  # absent where the quantizer is

    file = read_header(path)
    if file.byte_order == "S":
        return "its byte order is not that of this machine"
    architecture = file.fields["general.architecture"].contents()
    if is_gguf_arch_supported(architecture):
        return f"transformers maps the tensors of the architecture {architecture} in another way"
    return None


def is_mostly_packed(path: str) -> bool:
    """Return whether most weights of a GGUF file are of types that stay packed. The reader's errors pass through."""
    sizes = [(tensor.tensor_type.name in FORMATS, int(tensor.n_elements)) for tensor in read_header(path).tensors]
    return 2 * sum(size for packed, size in sizes if packed) > sum(size for _, size in sizes)


@contextmanager
def packed_weights(dtype: torch.dtype, *, batch_invariant: bool) -> Iterator[dict[str, Any]]:
    """Let transformers' `from_pretrained` keep the blocks of a GGUF file for which `reason_to_dequantise` is None.

    Yields no arguments for it.
    """
    original = auto.AUTO_QUANTIZER_MAPPING["gguf"]

    class Loader(original):  # type: ignore[valid-type, misc]
        """Packs weights before transformers loads the others."""

        def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
            super()._process_model_before_weight_loading(model, **kwargs)
            self._packed = _Packer(model, kwargs["checkpoint_files"][0], dtype, batch_invariant).pack()

        def update_dtype(self, dtype: torch.dtype | None) -> Any:
            if dtype is None:
                return super().update_dtype(dtype)
            self.dtype = dtype  # without transformers' advice to take float32 for its own kernels
            return dtype

        def get_state_dict(self, checkpoint_file: str, model: PreTrainedModel) -> Any:
            with _without(self._packed):
                return super().get_state_dict(checkpoint_file, model)

    auto.AUTO_QUANTIZER_MAPPING["gguf"] = Loader
    try:
        yield {}
    finally:
        auto.AUTO_QUANTIZER_MAPPING["gguf"] = original


@contextmanager
def _without(names: set[str]) -> Iterator[None]:
    """Hide tensors of GGUF files from transformers, which would dequantise them, and give it the others quickly."""
    originals = gguf.GGUFReader, gguf.dequantize
    gguf.GGUFReader, gguf.dequantize = partial(header_for_transformers, omitted=names), dequantised
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.dequantize = originals


def dequantised(blocks: Any, kind: gguf.GGMLQuantizationType) -> Any:
    """Return a tensor as float32, as `gguf.dequantize` does, and release the pages of the file.

    gguf copies bfloat16 three times.
    """
    if kind == gguf.GGMLQuantizationType.BF16:
        halves = blocks.view(np.uint16)
        weights = np.zeros(halves.shape, np.float32)
        weights.view(np.uint16)[..., 1::2] = halves
    else:
        weights = np.array(gguf.quants.dequantize(blocks, kind))
    release_pages(blocks)
    return weights


class _Packer:
    """Replaces the modules of a model without weights by those that hold the blocks of a file."""

    def __init__(self, model: PreTrainedModel, path: str, dtype: torch.dtype, batch_invariant: bool) -> None:
        self._model = model
        self._path = Path(path)
        self._dtype = dtype
        self._batch_invariant = batch_invariant
        self._file = read_header(path)
        architecture = self._file.fields["general.architecture"].contents()
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())

    def pack(self) -> set[str]:
        """Return the names of the tensors that are packed."""
        packed: set[str] = set()
        names = get_gguf_hf_weights_map(self._model, self._processor)
        dense: Counter[str] = Counter()
        size = sum(int(tensor.n_bytes) for tensor in self._file.tensors)
        for tensor in with_progress(self._file.tensors, size, lambda tensor: tensor.n_bytes):
            name, kind = names.get(tensor.name, ""), tensor.tensor_type.name
            order = self._order_of_rows(tensor, name)
            if order is None:
                if kind not in _FLOATS:
                    dense[kind] += int(tensor.n_elements)
                continue
            self._replace(name.removesuffix(".weight"), self._read(tensor, name, order))
            packed.add(tensor.name)
        self._warn(dense)
        return packed

    def _warn(self, dense: Counter[str]) -> None:
        if not dense:
            return
        size = sum(dense.values()) * self._dtype.itemsize / 2**20
        logger.warning(
            "some tensors of type %s are dequantised, to %.0f MiB: packed stay %s in linear layers and embeddings",
            ", ".join(sorted(dense)),
            size,
            ", ".join(FORMATS),
        )

    def _order_of_rows(self, tensor: Any, name: str) -> Any:
        """Return the row of the file for each output of a weight that can stay packed, otherwise None."""
        if tensor.tensor_type.name not in FORMATS or not name.endswith(".weight") or len(tensor.shape) != 2:
            return None
        try:
            module = self._model.get_submodule(name.removesuffix(".weight"))
        except AttributeError:
            return None
        if type(module) is not nn.Linear and not isinstance(module, nn.Embedding):
            return None
        tied = [other for other, source in self._model.all_tied_weights_keys.items() if source == name]
        if any(type(self._model.get_submodule(other.rpartition(".")[0])) is not nn.Linear for other in tied):
            return None
        return self._processed_order(tensor)

    def _processed_order(self, tensor: Any) -> Any:
        """Find out what transformers does to a weight: it is given the numbers of rows and columns instead."""
        rows = int(tensor.shape[1])
        numbers = np.arange(2 * rows, dtype=np.float64).reshape(rows, 2)
        try:
            result = self._processor.process(
                weights=numbers, name=tensor.name, tensor_key_mapping={}, parsed_parameters={"tensors": {}}
            )
        except Exception:  # noqa: BLE001  # it needs the real columns, and gets an answer with them
            return None
        found = result.weights
        if result.name != tensor.name or found.shape != numbers.shape:
            return None
        order = found[:, 0] / 2
        whole = np.array_equal(np.sort(order), np.arange(rows)) and np.array_equal(found[:, 1], found[:, 0] + 1)
        return order.astype(np.int32) if whole else None

    def _read(self, tensor: Any, name: str, order: Any) -> GroupedWeight:
        columns, rows = (int(size) for size in tensor.shape)
        module: Any = self._model.get_submodule(name.removesuffix(".weight"))
        expected = tuple(module.weight.shape)
        if (rows, columns) != expected:
            raise ModelLoadError(
                f"tensor {tensor.name!r} of {self._path.name} has {rows} rows of {columns} values, but the "
                f"configuration in the file needs {expected[0]} rows of {expected[1]}: convert the model again"
            )
        permuted = not np.array_equal(order, np.arange(rows))
        try:
            return GroupedWeight(
                FORMATS[tensor.tensor_type.name], tensor.data, order if permuted else None, release=release_pages
            )
        except BadScaleError as error:
            raise ModelLoadError(
                f"tensor {tensor.name!r} of {self._path.name} cannot be used: {error}, so its weights would be "
                "infinite or NaN; fetch or convert the file again"
            ) from error

    def _replace(self, name: str, weight: GroupedWeight) -> None:
        module = self._model.get_submodule(name)
        if isinstance(module, nn.Embedding):
            replace_embedding(module, weight, self._dtype)
        else:
            self._replace_linear(name, weight)
        tied = self._model.all_tied_weights_keys
        for other in [other for other, source in tied.items() if source == f"{name}.weight"]:
            self._replace_linear(other.rpartition(".")[0], weight)
            del tied[other]

    def _replace_linear(self, name: str, weight: GroupedWeight) -> None:
        parent, _, child = name.rpartition(".")
        bias: Any = self._model.get_submodule(name).bias
        layer = GroupedLinear([weight], bias, self._dtype, batch_invariant=self._batch_invariant)
        setattr(self._model.get_submodule(parent), child, layer)
