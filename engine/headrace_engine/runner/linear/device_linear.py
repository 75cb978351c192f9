"""Linear layers of a GPU: torch's own matrix products, on weights as they are."""

from typing import ClassVar

import torch
from torch import nn

from headrace_engine.runner.elementwise import torch_ops, triton_ops
from headrace_engine.runner.elementwise.ops import ElementwiseOps
from headrace_engine.runner.linear.prepared_linear import PreparedLinear


class DeviceLinear(PreparedLinear):
    """Takes the place of one or several merged `nn.Linear`, on the device of their weights."""

    ops: ClassVar[ElementwiseOps] = torch_ops

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self._weight = weight.detach()
        self._bias = None if bias is None else bias.detach()
        self.num_bytes = weight.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self._weight, self._bias)

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """The product itself adds, without another pass over memory; a bias is left to the caller's pass."""
        if self._bias is not None:
            return nn.functional.linear(x, self._weight, self._bias)
        out.addmm_(x, self._weight.t())
        return None


class TritonLinear(DeviceLinear):
    """With Triton's kernels between the products."""

    ops: ClassVar[ElementwiseOps] = triton_ops
