"""Counts the memory that the weights of a model will take, and refuses a model that does not fit."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headrace_engine.checkpoints.checkpoint import is_gguf
from headrace_engine.errors import ConfigError
from headrace_engine.runner.linear.grouped_weight import INTEGER_FORMATS, GroupedFormat, integer_block
from headrace_engine.runner.memory import available_memory

_ITEM_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_FLOATS = {"F64", "F32", "F16", "BF16"}
_PACKED_INTEGERS = ("qweight", "weight_packed", "weight")
"""The tensors with the integers of a weight, by the last part of their names. Words are of type I32."""
_SCALES = ("scales", "weight_scale")


def weight_bytes(
    folder: Path,
    dtype: torch.dtype,
    integer_bits: int | None = None,
    *,
    packs_integers: bool = False,
    widens_float8: bool = True,
) -> int:
    """Return the bytes of all tensors in safetensors files after loading in `dtype`. Reads only the headers.

    Args:
        integer_bits: of each weight of a checkpoint of integers. None: there are none, or they stay as they are.
        packs_integers: whether integers become `INTEGER_FORMATS` where these have their group. Otherwise they become
            `dtype`.
        widens_float8: whether weights in FP8 become `dtype`.
    """
    tensors: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            tensors |= json.loads(file.read(int.from_bytes(file.read(8), "little")))
    tensors.pop("__metadata__", None)
    packed = _packed_modules(tensors, integer_bits) if packs_integers and integer_bits else {}
    total = sum(packed.values())
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if module in packed and last != "bias":
            continue
        kind = tensor["dtype"]
        widened = kind in _FLOATS or (kind == "F8_E4M3" and widens_float8)
        size = dtype.itemsize if widened else _ITEM_SIZES.get(kind, 1)
        if integer_bits is not None and _holds_integers(last, kind):
            size = dtype.itemsize * _codes_of_item(kind, integer_bits)
        total += math.prod(tensor["shape"]) * size
    return total


def _holds_integers(last: str, kind: str) -> bool:
    return last in _PACKED_INTEGERS and kind in ("I32", "I8")


def _codes_of_item(kind: str, bits: int) -> int:
    return 32 // bits if kind == "I32" else 1


def _packed_modules(tensors: dict[str, Any], bits: int) -> dict[str, int]:
    """Return the bytes of the integers, scales and zero points of each module whose weight stays packed."""
    found = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        scales = next((tensors[key] for each in _SCALES if (key := f"{module}.{each}") in tensors), None)
        if not _holds_integers(last, tensor["dtype"]) or scales is None:
            continue
        codes = math.prod(tensor["shape"]) * _codes_of_item(tensor["dtype"], bits)
        block = integer_block(codes // max(math.prod(scales["shape"]), 1))
        kind = None if block is None else INTEGER_FORMATS.get((8 if tensor["dtype"] == "I8" else bits, block))
        if kind is not None:
            found[module] = kind.packed_bytes(kind.block_inputs, codes // kind.block_inputs)
    return found


def _gguf_bytes(model: str, dtype: torch.dtype, packed: Mapping[str, GroupedFormat]) -> int:
    """Return the bytes of all tensors after loading. Matrices of the `packed` types are rearranged."""
    from headrace_engine.checkpoints.gguf_reader import read_header  # imports gguf, which other models do not need

    if not Path(model).is_file():
        return 0  # the loader raises the error
    total = 0
    for tensor in read_header(model).tensors:
        kind = packed.get(tensor.tensor_type.name)
        if kind is not None and len(tensor.shape) == 2:  # the experts of a layer have three dimensions
            total += kind.packed_bytes(*map(int, tensor.shape))
        else:
            total += dtype.itemsize * int(tensor.n_elements)
    return total


def check_weights_fit(
    model: str,
    dtype: torch.dtype,
    packed: Mapping[str, GroupedFormat] | None = None,
    integer_bits: int | None = None,
    *,
    widens_float8: bool = True,
) -> int:
    """Refuse a local model whose weights exceed the free memory, before the kernel has to kill a process.

    Returns the bytes of the weights.

    KV memory is checked when the weights are loaded.

    Args:
        packed: the types of a GGUF file whose blocks are kept. None: none are, and integers of safetensors are not.
        integer_bits, widens_float8: as in `weight_bytes`.

    Raises:
        ConfigError: the weights do not fit. Names the needed and the free bytes.
    """
    needed = (
        _gguf_bytes(model, dtype, packed or {})
        if is_gguf(model)
        else weight_bytes(Path(model), dtype, integer_bits, packs_integers=bool(packed), widens_float8=widens_float8)
    )
    free = available_memory()
    form = "packed blocks" if packed else str(dtype).removeprefix("torch.")
    if needed > free:
        raise ConfigError(
            f"the weights of {model!r} take {needed / 2**30:.1f} GiB as {form}, "
            f"but only {free / 2**30:.1f} GiB of memory are free"
        )
    return needed
