"""`IntegerWeight`: a weight as integers in groups of inputs, which readers of checkpoints return."""

from dataclasses import dataclass

import torch

from headrace_engine.runner.linear.grouped_weight import INTEGER_FORMATS, GroupedWeight, integer_block
from headrace_engine.runner.linear.quantised_weight import CodeKind, QuantisedWeight


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """weight[o, i] = scales[o, g] * (codes[o, i] - zeros[o, g]), where g = i // (inputs of a group)."""

    bits: int
    codes: torch.Tensor
    """uint8 [out, in]."""
    scales: torch.Tensor
    """Of any float type, [out, groups]."""
    zeros: torch.Tensor
    """int16 [out, groups]."""
    inputs: torch.Tensor | None = None
    """int32 [in], the input of the layer for each column. None: the same order."""
    input_bytes: int = 2
    """That an input is rounded to in products by integers. 1 if the format quantises inputs to 8 bits, too."""

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def can_stay_packed(self) -> bool:
        """Whether there is a format for groups of this size."""
        return integer_block(self.group) is not None

    def grouped(self) -> GroupedWeight:
        """Pack the weight for the kernels. Nothing is rounded."""
        out, inputs = self.codes.shape
        block = integer_block(self.group)
        assert block is not None
        scales, zeros = (
            part.repeat_interleave(self.group // block, 1).contiguous().view(torch.uint8).view(out, inputs // block, -1)
            for part in (self.scales.float(), self.zeros)
        )
        blocks = torch.cat([scales, zeros, self.codes.view(out, inputs // block, block)], dim=2)
        kind = INTEGER_FORMATS[self.bits, block]
        return GroupedWeight(kind, blocks.view(out, -1).numpy(), inputs=self.inputs, input_bytes=self.input_bytes)

    def quantised(self) -> QuantisedWeight:
        """Return the weight in the layout for a GPU. Nothing is rounded."""
        kind = CodeKind.INT4 if self.bits == 4 else CodeKind.INT8
        return QuantisedWeight(kind, self.codes, self.scales.float(), self.zeros, self.group, self.inputs)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise: [out, in]. Computes in float32, and rounds once."""
        out, inputs = self.codes.shape
        codes = self.codes.view(out, -1, self.group).float()
        values = (codes - self.zeros[..., None]).mul_(self.scales.float()[..., None]).view(out, inputs).to(dtype)
        return values if self.inputs is None else torch.empty_like(values).index_copy_(1, self.inputs.long(), values)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of int32 words, lowest bits first: [..., n] -> uint8 [..., n * 32 / bits]. `bits`: 4 or 8."""
    values = words.contiguous().view(torch.uint8)
    return values if bits == 8 else torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)
