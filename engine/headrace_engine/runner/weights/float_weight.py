"""`FloatWeight`: a weight in 8-bit floats with scales for blocks, which readers of FP8 checkpoints return."""

from dataclasses import dataclass

import torch

from headrace_engine.runner.linear.quantised_weight import CodeKind, QuantisedWeight


@dataclass(frozen=True, slots=True)
class FloatWeight:
    """weight[o, i] = values[o, i] * scales[o // rows, i // columns], where the block is (rows, columns).

    The last blocks may be cut off by the edge of the weight.
    """

    values: torch.Tensor
    """float8_e4m3fn [out, in]."""
    scales: torch.Tensor
    """float32 [blocks of out, blocks of in]."""
    block: tuple[int, int]

    def quantised(self) -> QuantisedWeight:
        """Return the weight in the layout for a GPU, with scales for each output."""
        scales = self.scales.repeat_interleave(self.block[0], 0)[: len(self.values)]
        return QuantisedWeight(CodeKind.FLOAT8, self.values, scales, None, self.block[1])

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Widen: [out, in]. Computes in float32, and rounds once."""
        out, inputs = self.values.shape
        scales = self.scales.repeat_interleave(self.block[1], 1)[:, :inputs]
        return self.values.float().mul_(scales.repeat_interleave(self.block[0], 0)[:out]).to(dtype)


def number_of_blocks(out: int, inputs: int, block: tuple[int, int]) -> tuple[int, int]:
    """Return how many blocks a weight has along outputs and inputs."""
    return -(-out // block[0]), -(-inputs // block[1])
