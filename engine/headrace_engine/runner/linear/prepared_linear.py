"""`PreparedLinear`: the interface of the layers that take the place of a model's `nn.Linear`."""

from typing import ClassVar

import torch
from torch import nn

from headrace_engine.runner.elementwise import native_ops
from headrace_engine.runner.elementwise.norm import Norm
from headrace_engine.runner.elementwise.ops import ElementwiseOps


class PreparedLinear(nn.Module):
    """A linear layer whose weight has a layout of its own. The original weight and bias can be freed afterwards."""

    exact = True
    """Whether it computes what the original layer did, up to the order of sums."""

    ops: ClassVar[ElementwiseOps] = native_ops
    """The elementwise kernels for the device of the weight."""

    num_bytes: int
    """Size of the original weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:  # noqa: ARG002  # subclasses use them
        super().__init__()

    def after_norm(self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        """Add `delta`, if given, to hidden [rows, in_features] in place; return the layer of its norm."""
        out: torch.Tensor = self(self.ops.add_rms_norm(hidden, delta, norm.weight, norm.eps))
        return out

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:  # noqa: ARG002  # subclasses use it
        """Apply the layer to x [rows, in_features].

        Either add the result to out [rows, out_features] and return None, or return it for the caller to add.
        """
        added: torch.Tensor = self(x)
        return added


LinearKind = type[PreparedLinear]
