"""Lets a linear layer compute the GELU that follows it, as in the feed-forward layers of BERT's family."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers.activations import GELUActivation

from headrace_engine.runner.linear.native_linear import NativeGeluLinear


class GeluFusion:
    """Finds linear layers whose output goes to an exact GELU of the same parent module, and computes both at once."""

    def __init__(self) -> None:
        self._inputs: dict[nn.Module, set[nn.Module | None]] = {}
        """For each GELU the layers whose outputs it has taken. None stands for any other tensor."""

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Find the pairs while the model computes within the block."""
        output_of: dict[int, tuple[nn.Module, Any]] = {}  # holds the outputs, so that no other object gets their ids

        def remember(layer: nn.Module, _: Any, output: Any) -> None:
            output_of[id(output)] = layer, output

        def look_up(gelu: nn.Module, args: tuple[Any, ...], _: Any) -> None:
            layer, _ = output_of.get(id(args[0]), (None, None))
            self._inputs.setdefault(gelu, set()).add(layer)

        with ExitStack() as hooks:
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    hooks.callback(module.register_forward_hook(remember).remove)
                elif is_exact_gelu(module):
                    hooks.callback(module.register_forward_hook(look_up).remove)
            yield

    def apply(self, model: nn.Module, keep: Collection[nn.Module]) -> int:
        """Replace both modules of each pair, unless `keep` has the layer. Return the number of pairs."""
        count = 0
        for parent in list(model.modules()):
            children = {child: name for name, child in parent.named_children()}
            for gelu in children.keys() & self._inputs.keys():
                layers = self._inputs[gelu]
                layer = next(iter(layers))
                if len(layers) != 1 or layer not in children or type(layer) is not nn.Linear or layer in keep:
                    continue
                setattr(parent, children[layer], NativeGeluLinear(layer.weight, layer.bias))
                setattr(parent, children[gelu], nn.Identity())
                count += 1
        return count


def is_exact_gelu(module: nn.Module) -> bool:
    """Whether a module computes GELU by the error function, not by its approximation."""
    return isinstance(module, GELUActivation) or (isinstance(module, nn.GELU) and module.approximate == "none")
