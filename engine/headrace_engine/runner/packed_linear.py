"""Linear layers with weights in oneDNN's own blocked layout, made once at load.

At the few rows of a decode step oneDNN otherwise reorders the weight at every call, which costs several times the
product itself.
"""

from typing import cast

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

# The number of rows that oneDNN's choice of layout is tuned for; 64 was the best of those measured for 1 to 512 rows.
_ROWS_HINT = 64


class PackedLinear(nn.Module):
    """Drop-in for `nn.Linear` in inference; the unpacked weight is gone."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS_HINT)
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return packed


def supports(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes this type natively here."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linear_layers(model: nn.Module) -> int:
    """Replace every plain linear layer of the model; returns how many. Subclasses of nn.Linear are left alone."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                packed = PackedLinear(child.weight, child.bias)
            elif type(child) is Conv1D:  # GPT-2 keeps its weights transposed
                packed = PackedLinear(cast(torch.Tensor, child.weight).t(), cast(torch.Tensor, child.bias))
            else:
                continue
            setattr(parent, name, packed)
            count += 1
    return count
