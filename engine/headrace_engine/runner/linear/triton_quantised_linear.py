"""`TritonQuantisedLinear`: a linear layer on a GPU whose weight stays integers or 8-bit floats.

Few rows are multiplied by a kernel that dequantises in registers, so a step reads the few bits from memory. More rows
would dequantise a weight several times. For them it is dequantised once, into memory that is freed after the product.
Block sizes are computed, not measured.
"""

import importlib.util
from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import nn

from headrace_engine.runner.attention.triton_backend import is_interpreted
from headrace_engine.runner.elementwise import triton_ops
from headrace_engine.runner.elementwise.ops import ElementwiseOps
from headrace_engine.runner.linear.prepared_linear import PreparedLinear, QuantisedLinear
from headrace_engine.runner.linear.quantised_weight import PAIR_DISTANCE, CodeKind, QuantisedWeight

_MAX_KERNEL_ROWS = 128
_FLOAT8_CAPABILITY = (8, 9)
_BLOCK_OUTPUTS = 32
_BLOCK_BYTES = 2 * PAIR_DISTANCE


def supports(kind: CodeKind, device: torch.device) -> bool:
    """Whether the kernels compute weights of this kind on this device."""
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cpu":
        return is_interpreted()
    return kind is not CodeKind.FLOAT8 or torch.cuda.get_device_capability(device) >= _FLOAT8_CAPABILITY


class TritonQuantisedLinear(QuantisedLinear):
    """Computes what the dequantised layer would, up to the order of sums.

    Without a GPU it dequantises its weight in each call: a model is inspected on the CPU before it moves to its device.

    Args:
        bias: [out_features], or None.
        dtype: the type of inputs and outputs.
    """

    ops: ClassVar[ElementwiseOps] = triton_ops

    def __init__(self, weight: QuantisedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        PreparedLinear.__init__(self, torch.empty(0), bias)
        self.quantised = weight
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.weight_reads = 0
        self.num_bytes = weight.num_bytes
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._dtype = dtype

    def dense(self) -> torch.Tensor:
        return self.quantised.dense(self._dtype)

    def mergeable_with(self, other: QuantisedLinear) -> bool:
        return isinstance(other, TritonQuantisedLinear) and self.quantised.same_form(other.quantised)

    @classmethod
    def merged(cls, layers: Sequence[QuantisedLinear], bias: torch.Tensor | None) -> Self:
        """Return one layer whose output is the concatenation of the outputs of all."""
        own = [layer for layer in layers if isinstance(layer, TritonQuantisedLinear)]
        return cls(QuantisedWeight.merged([layer.quantised for layer in own]), bias, own[0]._dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.quantised
        if not supports(weight.kind, x.device):
            return nn.functional.linear(x, weight.dense(x.dtype), self.bias)
        rows = x.reshape(-1, self.in_features)
        if weight.inputs is not None:
            rows = rows[:, weight.inputs]
        product = _few_rows if len(rows) <= _MAX_KERNEL_ROWS else _many_rows
        return product(rows.contiguous(), weight, self.bias).view(*x.shape[:-1], self.out_features)


def _few_rows(x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    from headrace_engine.runner.linear.triton_kernels import quantised_linear_kernel

    out = x.new_empty(len(x), weight.out_features)
    block_rows = max(16, min(64, _next_power_of_2(len(x))))
    quantised_linear_kernel[(-(-weight.out_features // _BLOCK_OUTPUTS), -(-len(x) // block_rows))](
        out,
        x,
        *_tensors(weight),
        out if bias is None else bias,
        len(x),
        **_constants(weight),
        HAS_BIAS=bias is not None,
        BLOCK_ROWS=block_rows,
        BLOCK_OUTPUTS=_BLOCK_OUTPUTS,
        BLOCK_BYTES=_BLOCK_BYTES,
        num_warps=4,
    )
    return out


def _many_rows(x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    from headrace_engine.runner.linear.triton_kernels import dequantise_kernel

    dense = x.new_empty(weight.out_features, weight.in_features)
    dequantise_kernel[(-(-weight.out_features // _BLOCK_OUTPUTS), -(-weight.codes.shape[1] // _BLOCK_BYTES))](
        dense,
        *_tensors(weight),
        **_constants(weight),
        BLOCK_OUTPUTS=_BLOCK_OUTPUTS,
        BLOCK_BYTES=_BLOCK_BYTES,
        num_warps=4,
    )
    return nn.functional.linear(x, dense, bias)


def _tensors(weight: QuantisedWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return weight.codes, weight.scales, weight.codes if weight.zeros is None else weight.zeros


def _constants(weight: QuantisedWeight) -> dict[str, int | bool]:
    return {
        "OUTPUTS": weight.out_features,
        "INPUTS": weight.in_features,
        "ROW_BYTES": weight.codes.shape[1],
        "NUM_GROUPS": weight.scales.shape[1],
        "GROUP": weight.group,
        "PAIR_DISTANCE": PAIR_DISTANCE,
        "IS_INT4": weight.kind is CodeKind.INT4,
        "IS_FLOAT": weight.kind is CodeKind.FLOAT8,
        "HAS_ZEROS": weight.zeros is not None,
        "WIDEN": is_interpreted(),
    }


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
