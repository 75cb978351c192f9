"""Linear layers for a GPU: torch's own matrix products, with weights in their original layout."""

from typing import ClassVar

import torch
from torch import nn

from headrace_engine.runner.elementwise import torch_ops, triton_ops
from headrace_engine.runner.elementwise.ops import ElementwiseOps
from headrace_engine.runner.linear.prepared_linear import PreparedLinear


class DeviceLinear(PreparedLinear):
    """Replaces one `nn.Linear`, or several merged ones, on the device of their weights."""

    ops: ClassVar[ElementwiseOps] = torch_ops

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self._weight = weight.detach()
        self._bias = None if bias is None else bias.detach()
        self.num_bytes = weight.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self._weight, self._bias)

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Add in the product itself, without another pass over memory, unless there is a bias."""
        if self._bias is not None:
            return nn.functional.linear(x, self._weight, self._bias)
        out.addmm_(x, self._weight.t())
        return None


class TritonLinear(DeviceLinear):
    """A `DeviceLinear` with Triton's elementwise kernels."""

    ops: ClassVar[ElementwiseOps] = triton_ops
