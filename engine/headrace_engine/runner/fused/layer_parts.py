"""The parts of a decoder layer, recognised by what its children read and return in a probe run.

No names of architectures and no names of norms count. A norm belongs where its input or output is seen:

    hidden -> [norm] -> attention -> [norm] -> * scale, added -> [norm] -> MLP -> [norm] -> * scale, added

`fusion.py` verifies the result, so a part that is not seen here makes the layer one that is not fused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headrace_engine.runner.elementwise import torch_ops
from headrace_engine.runner.elementwise.ops import Activation, Norm
from headrace_engine.runner.linear.prepared_linear import QuantisedLinear

Linear = nn.Linear | QuantisedLinear

_SEPARATE = ("gate_proj", "up_proj")
_MERGED = ("gate_up_proj",)
_NEAR = 0.02  # of a factor that is estimated from rounded numbers


@dataclass(frozen=True, slots=True, eq=False)
class ChildCall:
    """A call of a child of the layer: the very tensors that it read and returned."""

    module: nn.Module
    given: torch.Tensor
    output: torch.Tensor


@dataclass(frozen=True, slots=True)
class Branch:
    """Attention or MLP, with what surrounds it. `scale` multiplies what is added to the residual stream."""

    call: ChildCall
    norm: Norm | None
    output_norm: Norm | None
    scale: float


@dataclass(frozen=True, slots=True)
class LayerParts:
    attention: Branch
    mlp: Branch


@dataclass(frozen=True, slots=True)
class Gate:
    """A gated MLP: down of (activation of gate * up). `gate_up`: two layers, or one whose output is both."""

    gate_up: tuple[Linear, ...]
    down: Linear
    activation: Activation


def is_linear(module: object) -> bool:
    """Whether a module computes a plain linear layer, by weights that can be merged."""
    return type(module) is nn.Linear or isinstance(module, QuantisedLinear)


def parts_of(layer: nn.Module, hidden: torch.Tensor, calls: Sequence[ChildCall]) -> LayerParts | None:
    """Return the parts of a layer, or None if it has others.

    Args:
        hidden: the input of the layer.
        calls: all calls of its children, in order.
    """
    weighty = [call for call in calls if next(call.module.parameters(), None) is not None or has_groups(call.module)]
    norms = {id(call): norm for call in weighty if (norm := Norm.of(call.module)) is not None}
    branches = [call for call in weighty if id(call) not in norms]
    if len(branches) != 2 or len({id(call.module) for call in weighty}) != len(weighty):
        return None
    found = []
    for call in branches:
        before = next((each for each in weighty if each.output is call.given), None)
        after = next((each for each in weighty if each.given is call.output), None)
        if {id(each) for each in (before, after) if each is not None} - norms.keys():
            return None
        found.append((before, call, after))
    used = {id(each) for before, _, after in found for each in (before, after) if each is not None}
    if used != norms.keys():
        return None
    second_before, second, _ = found[1]
    middle = second.given if second_before is None else second_before.given
    before, first, after = found[0]
    scale = _scale(layer, middle - hidden, first.output if after is None else after.output)
    if scale is None:
        return None
    attention, mlp = (Branch(call, norms.get(id(before)), norms.get(id(after)), scale) for before, call, after in found)
    return LayerParts(attention, mlp)


def has_groups(module: nn.Module) -> bool:
    """Whether a module has weights that are no parameters."""
    return any(isinstance(each, QuantisedLinear) for each in module.modules())


def _scale(layer: nn.Module, added: torch.Tensor, output: torch.Tensor) -> float | None:
    """Return the factor of a branch: one, or a number that the layer has and that fits. None if no number fits."""
    numbers = [value for value in vars(layer).values() if isinstance(value, float)]
    if not numbers:
        return 1.0
    added, output = added.float(), output.float()
    estimate = float((added * output).sum() / (output * output).sum())
    best = min((1.0, *numbers), key=lambda number: abs(number - estimate))
    return best if abs(best - estimate) <= _NEAR * abs(estimate) else None


def gate_of(call: ChildCall, differs: Any) -> Gate | None:
    """Return the parts of an MLP if it is gated, otherwise None.

    Args:
        differs: a function of two tensors and their type: whether they differ by more than rounding.
    """
    mlp: Any = call.module
    linear = {name for name, child in mlp.named_children() if is_linear(child)}
    names = next((names for names in (_SEPARATE, _MERGED) if linear == {*names, "down_proj"}), None)
    if names is None:
        return None
    layers = tuple(getattr(mlp, name) for name in names)
    gate_up = torch.cat([layer(call.given) for layer in layers], dim=-1)
    rows = gate_up.view(-1, gate_up.shape[-1])
    others = [child for child in mlp.children() if not is_linear(child)]
    for activation in Activation:
        if not all(computes(child, activation) for child in others):
            continue
        output = mlp.down_proj(torch_ops.gate(rows, activation)).view(call.output.shape)
        if not differs(output, call.output, output.dtype):
            return Gate(layers, mlp.down_proj, activation)
    return None


def computes(module: nn.Module, activation: Activation) -> bool:
    """Whether a module computes an activation, to the precision of float32: both forms of GELU are nearly the same."""
    numbers = torch.linspace(-6.0, 6.0, 97)
    try:
        return torch.allclose(module(numbers), torch_ops.activate(numbers, activation), rtol=1e-5, atol=1e-6)
    except (RuntimeError, TypeError):  # it is called in another way
        return False
