"""`PreparedLinear`: the interface of the layers that replace a model's `nn.Linear`, and the layers for a GPU."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import nn

from headrace_engine.runner.elementwise import native_ops, torch_ops, triton_ops
from headrace_engine.runner.elementwise.ops import ElementwiseOps, Norm


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

    def after_norm(self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm | None) -> torch.Tensor:
        """Add `delta`, if given, to hidden [rows, in_features] in place; return the layer of its norm, or of itself."""
        out: torch.Tensor = self(normalised(self.ops, hidden, delta, norm))
        return out

    def add_to(self, out: torch.Tensor, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor | None:  # noqa: ARG002
        """Apply the layer to x [rows, in_features], and multiply the result by `scale`.

        Either add that to out [rows, out_features] and return None, or return it for the caller to add.
        """
        added: torch.Tensor = self(x)
        return added if scale == 1.0 else added * scale


class QuantisedLinear(PreparedLinear, ABC):
    """A linear layer whose weight stays in few bits. Its attributes are those of `nn.Linear`."""

    in_features: int
    out_features: int
    bias: nn.Parameter | None

    weight_reads = 0
    """How often code of the model read `weight`."""

    @property
    def weight(self) -> torch.Tensor:
        """The dequantised weight, [out_features, in_features], for code that computes with it. Made in each access."""
        self.weight_reads += 1
        return self.dense()

    @abstractmethod
    def dense(self) -> torch.Tensor:
        """Dequantise the weight."""

    @abstractmethod
    def mergeable_with(self, other: "QuantisedLinear") -> bool:
        """Whether one layer can compute both."""

    @classmethod
    @abstractmethod
    def merged(cls, layers: Sequence["QuantisedLinear"], bias: torch.Tensor | None) -> Self:
        """Return one layer whose output is the concatenation of the outputs of all, which are `mergeable`."""


def mergeable(layers: Sequence[nn.Module]) -> bool:
    """Whether one layer in few bits can compute all layers."""
    first = layers[0]
    return isinstance(first, QuantisedLinear) and all(
        isinstance(layer, QuantisedLinear) and first.mergeable_with(layer) for layer in layers
    )


def normalised(
    ops: ElementwiseOps, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm | None
) -> torch.Tensor:
    """Add `delta`, if given, to hidden in place. Return the norm of hidden, or hidden itself without a norm."""
    if norm is not None:
        return ops.add_rms_norm(hidden, delta, norm.weight, norm.eps)
    if delta is not None:
        hidden += delta
    return hidden


LinearKind = type[PreparedLinear]


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

    def add_to(self, out: torch.Tensor, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor | None:
        """Add in the product itself, without another pass over memory, unless there is a bias."""
        if self._bias is not None:
            return super().add_to(out, x, scale)
        out.addmm_(x, self._weight.t(), alpha=scale)
        return None


class TritonLinear(DeviceLinear):
    """A `DeviceLinear` with Triton's elementwise kernels."""

    ops: ClassVar[ElementwiseOps] = triton_ops
