"""Replaces the experts of mixtures by `NativeExperts` where both compute the same.

The code knows no names of architectures. transformers keeps experts as two parameters, `gate_up_proj` [experts, 2 *
width, features] and `down_proj` [experts, features, width]. A module with these is run on a few numbers. Experts with
biases, with another gate or with another layout are kept.
"""

import logging
from typing import Any

import torch
from torch import nn

from headrace_engine.runner.elementwise.ops import Activation
from headrace_engine.runner.fused.layer_parts import computes
from headrace_engine.runner.linear.experts import NativeExperts
from headrace_engine.runner.memory import release_unused

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 12
# Maximum relative error. Another gate causes a much larger one.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02}


@torch.inference_mode()
def replace_experts(model: nn.Module) -> int:
    """Replace all experts that can be replaced, on the CPU. Return the number of replaced modules."""
    count = 0
    # The list must not hold the experts themselves: otherwise no weight would be freed before the last one is packed.
    for parent in [module for module in model.modules() if any(_has_weights(child) for child in module.children())]:
        for name in [name for name, child in parent.named_children() if _has_weights(child)]:
            count += _replace(parent, name)
            release_unused()
    return count


def _has_weights(module: nn.Module) -> bool:
    return dict(module.named_parameters()).keys() == {"gate_up_proj", "down_proj"}


def _replace(parent: nn.Module, name: str) -> bool:
    experts: Any = getattr(parent, name)
    activation = _activation(experts)
    if activation is not None:
        setattr(parent, name, NativeExperts(experts.gate_up_proj, experts.down_proj, activation))
    return activation is not None


def _activation(experts: Any) -> Activation | None:
    """Return the activation of the gate if the module computes gated experts, otherwise None."""
    gate_up, down = experts.gate_up_proj, experts.down_proj
    if gate_up.dim() != 3 or down.dim() != 3 or gate_up.dtype not in _TOLERANCE or gate_up.dtype is not down.dtype:
        return None
    num_experts, features, width = down.shape
    if gate_up.shape != (num_experts, 2 * width, features):
        return None
    for activation in Activation:
        if all(computes(child, activation) for child in experts.children()) and _verified(experts, activation):
            return activation
    return None


def _verified(experts: Any, activation: Activation) -> bool:
    """Whether `NativeExperts` computes what the module does. Only the experts of the probe are packed for it."""
    num_experts, features, _ = experts.down_proj.shape
    own = experts.gate_up_proj
    tokens = torch.arange(_PROBE_TOKENS)
    x = torch.sin(torch.arange(1.0, _PROBE_TOKENS * features + 1)).view(_PROBE_TOKENS, features).to(own.dtype)
    tried = torch.tensor(sorted({0, num_experts // 2, num_experts - 1}))
    chosen = torch.stack([tokens, tokens + 1], dim=1) % len(tried)
    weights = (0.2 + 0.05 * torch.stack([tokens, tokens.flip(0)], dim=1)).to(own.dtype)
    try:
        expected = experts(x, tried[chosen], weights)
        few = NativeExperts(own[tried], experts.down_proj[tried], activation)
    except (RuntimeError, TypeError, IndexError) as error:  # it is called in another way
        logger.debug("experts are kept: %s", error)
        return False
    if not isinstance(expected, torch.Tensor) or expected.shape != x.shape:
        return False
    found = few(x, chosen, weights)
    distance = (found.float() - expected.float()).norm() / expected.float().norm()
    return bool(distance < _TOLERANCE[own.dtype])
