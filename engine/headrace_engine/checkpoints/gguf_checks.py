"""Finds damage in the header of a GGUF file, before transformers reads it: its errors do not name the field."""

import math
import re
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES

from headrace_engine.checkpoints.gguf_reader import HeaderReader, read_header

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_COUNTS: Final = (
    "block_count",
    "context_length",
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
)
_POSITIVE: Final = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "rope.freq_base")
_WITHOUT_ATTENTION: Final = ("mamba", "rwkv")
"""Architectures that begin so have 0 heads."""
_LAYER: Final = re.compile(r"blk\.(\d+)\.")
_DAMAGED: Final = "the file is damaged; fetch or convert it again"


def check_header(path: str) -> None:
    """Raise ValueError that names the field or tensor, its value, and what is allowed."""
    with Path(path).open("rb") as file:
        beginning = file.read(8)
    if beginning[:4] != _MAGIC:
        raise ValueError(f"it begins with {beginning[:4]!r}, not with {_MAGIC!r}: it is no GGUF file; fetch it again")
    versions = [int.from_bytes(beginning[4:], order) for order in ("little", "big")]
    if not set(versions) & set(_VERSIONS):
        raise ValueError(f"it is of GGUF version {min(versions)}, supported are 2 and 3: convert the model again")
    header = read_header(path)
    _check_types(header)
    _check_fields(header)


def _check_types(header: HeaderReader) -> None:
    """Refuse types that the gguf package knows by name only."""
    for tensor in {tensor.tensor_type: tensor for tensor in reversed(header.tensors)}.values():
        kind = tensor.tensor_type
        try:
            gguf.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError as error:
            raise ValueError(
                f"tensor {tensor.name!r} is of type {kind.name}, which the gguf package cannot dequantise: take a file "
                "of another type, or update the package"
            ) from error


def _check_fields(header: HeaderReader) -> None:
    architecture = _value(header, "general.architecture")
    if not isinstance(architecture, str):
        raise ValueError(f"field 'general.architecture' is missing: {_DAMAGED}")
    if architecture.startswith(_WITHOUT_ATTENTION):
        return
    for name in (f"{architecture}.{key}" for key in _COUNTS):
        count = _value(header, name)
        if isinstance(count, int) and count < 1:  # a list has a number for each layer, which may be 0
            raise ValueError(f"field {name!r} must be at least 1, got {count}: {_DAMAGED}")
    for name in (f"{architecture}.{key}" for key in _POSITIVE):
        number = _value(header, name)
        if isinstance(number, float) and not 0 < number < math.inf:
            raise ValueError(f"field {name!r} must be a finite number above 0, got {number}: {_DAMAGED}")
    layers = _value(header, f"{architecture}.block_count")
    for tensor in header.tensors:
        found = _LAYER.match(tensor.name)
        if isinstance(layers, int) and found and int(found[1]) >= layers:
            raise ValueError(
                f"tensor {tensor.name!r} belongs to no layer, because field '{architecture}.block_count' is {layers}: "
                f"{_DAMAGED}"
            )


def _value(header: HeaderReader, name: str) -> Any:
    field = header.fields.get(name)
    return None if field is None else field.contents()
