"""Linear layers with weights in oneDNN's own blocked layout, made once at load.

At the few rows of a decode step oneDNN otherwise reorders the weight at every call, which costs several times the
product itself.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from headrace_engine.runner.fused import elementwise
from headrace_engine.runner.fused.norm import Norm
from headrace_engine.runner.fused.passes import Passes
from headrace_engine.runner.memory import release_unused

# The number of rows that oneDNN's choice of layout is tuned for; 64 was the best of those measured for 1 to 512 rows.
_ROWS_HINT = 64
# Packed weights exist twice, packed and as they were read, until the latter are released: so often, in bytes.
_RELEASE_AFTER = 64 << 20


class PreparedLinear(nn.Module):
    """A linear layer whose weight lies in a form of its own; made of a weight and a bias given up by their owner."""

    exact = True
    """Whether it computes what the layer did, but for the order of sums."""

    passes: ClassVar[Passes] = elementwise
    """What computes between such layers, where their weights lie."""

    num_bytes: int
    """Of the weight as it was read."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:  # noqa: ARG002  # what all take
        super().__init__()

    def after_norm(self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        """Add `delta` to hidden [rows, in_features] in place, where there is one; the layer of its norm."""
        out: torch.Tensor = self(self.passes.add_rms_norm(hidden, delta, norm.weight, norm.eps))
        return out

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:  # noqa: ARG002  # others add at once
        """Add the layer of x [rows, in_features] to out [rows, out_features], or return it for the caller to add."""
        added: torch.Tensor = self(x)
        return added


LinearKind = type[PreparedLinear]


class PackedLinear(PreparedLinear):
    """Drop-in for `nn.Linear` in inference; the unpacked weight is gone."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS_HINT)
        self.num_bytes = weight.nbytes
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return packed


def supports(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes this type natively here."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def computes_bfloat16() -> bool:
    """Whether products in bfloat16 are faster here than in float32.

    An x86 processor without instructions for them takes three to four times as long as for float32.
    """
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("architecture") != "x86_64":
        return supports(torch.bfloat16)
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("avx_ne_convert"))


class _Watched(nn.Linear):
    """A linear layer that notices when somebody else reads its weight."""

    read_by_others = False
    _in_forward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._in_forward = True
        try:
            return super().forward(x)
        finally:
            self._in_forward = False

    def __getattribute__(self, name: str) -> Any:
        # The parameter itself is found by nn.Module's __getattr__, so this sees every access to it.
        if name == "weight" and not self._in_forward:
            self.read_by_others = True
        return super().__getattribute__(name)


@contextmanager
def watch_weights(model: nn.Module) -> Iterator[set[nn.Module]]:
    """While it lasts, find the linear layers whose weight the model's own code reads: those must not be packed.

    The set is complete when the block ends.
    """
    found: set[nn.Module] = set()
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer.__class__ = _Watched
    try:
        yield found
    finally:
        for layer in layers:
            if layer.read_by_others:
                found.add(layer)
                del layer.read_by_others
            layer.__dict__.pop("_in_forward", None)
            layer.__class__ = nn.Linear


def pack_linear_layers(model: nn.Module, keep: Collection[nn.Module] = (), linear: LinearKind = PackedLinear) -> int:
    """Replace every plain linear layer of the model but those of `keep`; returns how many.

    Subclasses of nn.Linear are left alone.

    Args:
        linear: what takes a layer's place.
    """
    count = 0
    copied = _RELEASE_AFTER  # what was read before, to look at the model, goes first
    # The list must not hold the layers themselves, or no original would be freed before the last is packed.
    for parent in [module for module in model.modules() if next(module.children(), None) is not None]:
        for name, child in list(parent.named_children()):
            if child in keep:
                continue
            if copied >= _RELEASE_AFTER:
                copied = 0
                release_unused()
            if type(child) is nn.Linear:
                packed = linear(child.weight, child.bias)
            elif type(child) is Conv1D:  # GPT-2 keeps its weights transposed
                packed = linear(cast(torch.Tensor, child.weight).t(), cast(torch.Tensor, child.bias))
            else:
                continue
            setattr(parent, name, packed)
            count += 1
            copied += packed.num_bytes
    release_unused()
    return count
