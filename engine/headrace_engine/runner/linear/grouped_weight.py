"""`GroupedWeight`: a weight in groups of few bits, in the layout of `grouped_weights.h`. Nothing is rounded."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from headrace_engine.runner.linear import native_linear
from headrace_engine.runner.native import native_library
from headrace_engine.runner.native.huge_pages import HugePages
from headrace_wire.errors import CopyableError

_PAGES = HugePages()
_COLUMNS = 16  # outputs of a strip
_PART = 16 << 20  # bytes of the file that are packed before they are released

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class GroupedFormat:
    """A block format of GGUF files, or of integers with a scale and a zero point for each block."""

    name: str
    number: int
    """In grouped_weights.h."""
    block_inputs: int
    file_bytes: int
    """Of a block in the file."""

    def packed_bytes(self, in_features: int, out_features: int) -> int:
        """Return the bytes of a weight in memory."""
        return int(native_linear.library().headrace_grouped_bytes(self.number, in_features, out_features))


_SIZES: Final = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}
FORMATS: Final = {name: GroupedFormat(name, number, *sizes) for number, (name, sizes) in enumerate(_SIZES.items())}
"""The formats that are served as they are, by their name in GGUF."""
_INTEGERS: Final = [(bits, inputs) for bits in (4, 8) for inputs in (32, 128)]
INTEGER_FORMATS: Final = {
    (bits, inputs): GroupedFormat(f"INT{bits}_{inputs}", len(FORMATS) + index, inputs, 6 + inputs)
    for index, (bits, inputs) in enumerate(_INTEGERS)
}
"""By bits and inputs of a block. A block is a float32 scale, an int16 zero point, and a byte for each code."""


def integer_block(group: int) -> int | None:
    """Return the inputs of a block for integers in groups of this size; None if there is no such format."""
    if group % 32:
        return None
    return 128 if group % 128 == 0 else 32


class BadScaleError(CopyableError, ValueError):
    """A scale is infinite or not a number."""

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row} has a scale that is not finite")
        self.row = row


class GroupedWeight:
    """The weight of a linear layer or of an embedding.

    Args:
        kind: the format of all blocks.
        blocks: [out_features, bytes of a row], the rows of the file.
        order: the row of the file for each output. None: the same order.
        inputs: int32 [in_features], the input of the layer for each column of the file. None: the same order.
        input_bytes: that an input is rounded to in products by integers, 1 or 2.
        release: called with rows that are packed. It may release their memory.

    Raises:
        BadScaleError: a scale of the file is not finite.
    """

    def __init__(
        self,
        kind: GroupedFormat,
        blocks: Bytes,
        order: np.ndarray[Any, Any] | None = None,
        *,
        inputs: torch.Tensor | None = None,
        input_bytes: int = 1,
        release: Callable[[Bytes], None] | None = None,
    ) -> None:
        assert blocks.dtype == np.uint8
        assert blocks.flags.c_contiguous
        self.format = kind
        self.inputs = inputs
        self.input_bytes = input_bytes
        self.out_features = blocks.shape[0]
        self.in_features = blocks.shape[1] // kind.file_bytes * kind.block_inputs
        self.strips = _PAGES.empty((self._bytes(self.out_features),), torch.uint8)
        step = self.out_features
        if order is None:  # a part at a time: otherwise a large weight would be in memory twice
            step = max(_PART // blocks.shape[1] // _COLUMNS, 1) * _COLUMNS
        for first in range(0, self.out_features, step):
            part = blocks[first : first + step]
            self._pack(first, part, None if order is None else np.ascontiguousarray(order, np.int32))
            if release is not None:
                release(part)

    def _bytes(self, outputs: int) -> int:
        return self.format.packed_bytes(self.in_features, outputs)

    def _pack(self, first: int, blocks: Bytes, order: np.ndarray[Any, Any] | None) -> None:
        bad_row = native_linear.library().headrace_pack_blocks(
            self.format.number,
            torch.get_num_threads(),
            self.in_features,
            len(blocks),
            blocks.ctypes.data,
            None if order is None else order.ctypes.data,
            self.strips.data_ptr() + self._bytes(first),
        )
        if bad_row >= 0:
            raise BadScaleError(first + bad_row)

    def part(self, first: int, last: int) -> "GroupedWeight":
        """Return the outputs first..last, which share memory with this weight. Raises ValueError within a strip."""
        if first % _COLUMNS or (last % _COLUMNS and last != self.out_features):
            raise ValueError(f"outputs {first} to {last} are no whole strips of {_COLUMNS}")
        found = copy(self)
        found.out_features = last - first
        found.strips = self.strips[self._bytes(first) : self._bytes(last)]
        return found

    def rows(self, outputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise the rows of these outputs: int64 [count] -> [count, in_features]."""
        outputs = outputs.contiguous()
        out = torch.empty((len(outputs), self.in_features), dtype=dtype)
        native_linear.library().headrace_unpack_rows(
            self.format.number,
            native_library.DTYPES[dtype],
            torch.get_num_threads(),
            self.in_features,
            self.strips.data_ptr(),
            outputs.data_ptr(),
            len(outputs),
            out.data_ptr(),
        )
        return out if self.inputs is None else torch.empty_like(out).index_copy_(1, self.inputs.long(), out)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise all rows: [out_features, in_features]."""
        return self.rows(torch.arange(self.out_features), dtype)
