"""`QuantisedWeight`: a weight in integers or 8-bit floats with scales, in a layout for Triton's kernels."""

from collections.abc import Sequence
from enum import Enum
from typing import Self

import torch
from torch import nn

# A byte holds the codes of two inputs so many inputs apart. So bytes side by side hold inputs that are side by side.
PAIR_DISTANCE = 32


class CodeKind(Enum):
    """What the codes of a weight are."""

    INT4 = "int4"
    INT8 = "int8"
    FLOAT8 = "float8_e4m3fn"


class QuantisedWeight(nn.Module):
    """weight[o, i] = scales[o, i // group] * (codes[o, i] - zeros[o, i // group]), where a float has no zero point.

    Its tensors are buffers, so it moves to a device as other modules do.

    Args:
        kind: of the codes.
        codes: [out, in], uint8 or float8_e4m3fn.
        scales: float32 [out, groups]. The last group may have fewer inputs.
        zeros: int16 [out, groups], or None.
        group: inputs of a group.
        inputs: int32 [in], the input of the layer for each column. None: the same order.
    """

    codes: torch.Tensor
    """uint8 [out, bytes of a row]."""
    scales: torch.Tensor
    zeros: torch.Tensor | None
    inputs: torch.Tensor | None

    def __init__(
        self,
        kind: CodeKind,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        group: int,
        inputs: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.group = kind, group
        self.out_features, self.in_features = codes.shape
        codes = _paired(codes) if kind is CodeKind.INT4 else codes.view(torch.uint8)
        for name, tensor in (("codes", codes), ("scales", scales), ("zeros", zeros), ("inputs", inputs)):
            self.register_buffer(name, None if tensor is None else tensor.contiguous(), persistent=False)

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise: [out, in]. Computes in float32, and rounds once."""
        values = self._values().float()
        if self.zeros is not None:
            values -= self._of_inputs(self.zeros)
        values = (values * self._of_inputs(self.scales)).to(dtype)
        return values if self.inputs is None else torch.empty_like(values).index_copy_(1, self.inputs.long(), values)

    def _values(self) -> torch.Tensor:
        if self.kind is CodeKind.INT4:
            runs = self.codes.view(self.out_features, -1, 1, PAIR_DISTANCE)
            return torch.cat((runs & 15, runs >> 4), dim=2).flatten(1)[:, : self.in_features]
        return self.codes.view(torch.float8_e4m3fn) if self.kind is CodeKind.FLOAT8 else self.codes

    def _of_inputs(self, groups: torch.Tensor) -> torch.Tensor:
        return groups.repeat_interleave(self.group, 1)[:, : self.in_features]

    def same_form(self, other: "QuantisedWeight") -> bool:
        """Whether both differ in values and outputs only."""
        if (self.kind, self.group, self.in_features) != (other.kind, other.group, other.in_features):
            return False
        orders = (self.inputs, other.inputs)
        if (self.zeros is None) != (other.zeros is None) or (self.inputs is None) != (other.inputs is None):
            return False
        return orders[0] is None or orders[1] is None or torch.equal(orders[0], orders[1])

    @classmethod
    def merged(cls, weights: Sequence["QuantisedWeight"]) -> Self:
        """Return one weight with the outputs of all, which have the same form."""
        found = cls.__new__(cls)
        nn.Module.__init__(found)
        first = weights[0]
        found.kind, found.group, found.in_features = first.kind, first.group, first.in_features
        found.out_features = sum(weight.out_features for weight in weights)
        for name in ("codes", "scales", "zeros"):
            parts = [getattr(weight, name) for weight in weights]
            found.register_buffer(name, None if parts[0] is None else torch.cat(parts), persistent=False)
        found.register_buffer("inputs", first.inputs, persistent=False)
        return found


def _paired(codes: torch.Tensor) -> torch.Tensor:
    """Put two codes of 4 bits into a byte, and fill the last run of a row with zeros."""
    out, inputs = codes.shape
    runs = nn.functional.pad(codes, (0, -inputs % (2 * PAIR_DISTANCE))).view(out, -1, 2, PAIR_DISTANCE)
    return (runs[:, :, 0] | runs[:, :, 1] << 4).view(out, -1)
