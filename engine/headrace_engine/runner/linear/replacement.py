"""Replaces a model's linear layers, except those whose weights the model's own code reads."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from headrace_engine.runner.linear.packed_linear import PackedLinear
from headrace_engine.runner.linear.prepared_linear import LinearKind, QuantisedLinear
from headrace_engine.runner.memory import release_unused

# A replaced weight exists twice until the original is released. This many bytes may accumulate in between.
_RELEASE_AFTER = 64 << 20


class _Watched(nn.Linear):
    """A linear layer that notices when other code reads its weight."""

    read_by_others = False
    _in_forward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._in_forward = True
        try:
            return super().forward(x)
        finally:
            self._in_forward = False

    def __getattribute__(self, name: str) -> Any:
        # nn.Module finds parameters in __getattr__, so this sees every access.
        if name == "weight" and not self._in_forward:
            self.read_by_others = True
        return super().__getattribute__(name)


@contextmanager
def watch_weights(model: nn.Module) -> Iterator[set[nn.Module]]:
    """Find the linear layers whose weights the code of the model reads within the block. They must not be replaced.

    The yielded set is complete when the block ends.
    """
    found: set[nn.Module] = set()
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    quantised = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    for layer in layers:
        layer.__class__ = _Watched
    for each in quantised:
        each.weight_reads = 0
    try:
        yield found
    finally:
        for layer in layers:
            if layer.read_by_others:
                found.add(layer)
                del layer.read_by_others
            layer.__dict__.pop("_in_forward", None)
            layer.__class__ = nn.Linear
        found.update(each for each in quantised if each.weight_reads)


def pack_linear_layers(model: nn.Module, keep: Collection[nn.Module] = (), linear: LinearKind = PackedLinear) -> int:
    """Replace every plain linear layer of the model, except those of `keep`. Return their number.

    Subclasses of nn.Linear are kept.

    Args:
        linear: the class of the new layers.
    """
    count = 0
    copied = _RELEASE_AFTER  # releases first what the inspection of the model has read
    # The list must not hold the layers themselves: otherwise no weight would be freed before the last one is packed.
    for parent in [module for module in model.modules() if next(module.children(), None) is not None]:
        for name, child in list(parent.named_children()):
            if child in keep:
                continue
            if copied >= _RELEASE_AFTER:
                copied = 0
                release_unused()
            if type(child) is nn.Linear:
                packed = linear(child.weight, child.bias)
            elif type(child) is Conv1D:  # GPT-2 stores its weights transposed
                packed = linear(cast(torch.Tensor, child.weight).t(), cast(torch.Tensor, child.bias))
            else:
                continue
            setattr(parent, name, packed)
            count += 1
            copied += packed.num_bytes
    release_unused()
    return count
