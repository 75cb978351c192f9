"""`ElementwiseOps` in plain torch, for a device without Triton and for tests.

Results are rounded to the type of the data at the same places as in transformers.
"""

import torch
from torch import nn

from headrace_engine.runner.elementwise.ops import Activation, heads_together


def add_rms_norm(hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `delta`, if given, to hidden in place. Return the root mean square norm (Zhang and Sennrich 2019)."""
    if delta is not None:
        hidden += delta
    return _rms_norm(hidden, weight, eps)


def add_normed(hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Add the root mean square norm of delta to hidden, in place."""
    hidden += _rms_norm(delta, weight, eps)


def norm_rope(
    qkv: torch.Tensor,
    q_heads: int,
    k_heads: int,
    head_dim: int,
    *,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cosine: torch.Tensor | None,
    sine: torch.Tensor | None,
) -> None:
    """Normalise and rotate the queries and keys at the front of each row, in place. See `native_ops.norm_rope`."""
    heads, together = qkv.view(qkv.shape[0], -1, head_dim), heads_together(q_weight, k_weight, head_dim)
    for part, weight in ((heads[:, :q_heads], q_weight), (heads[:, q_heads : q_heads + k_heads], k_weight)):
        if weight is not None:
            rows = part.flatten(1) if together else part
            part.copy_(_rms_norm(rows, weight, eps).view(part.shape))
        if cosine is not None and sine is not None:
            turning = part[..., : cosine.shape[-1]]
            first, second = turning.chunk(2, dim=-1)
            turning.copy_(turning * cosine[:, None] + torch.cat((-second, first), dim=-1) * sine[:, None])


def gate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[tokens, gate | up] -> activation of gate * up, [tokens, half the features] (Shazeer 2020)."""
    own, up = gate_up.chunk(2, dim=-1)
    return activate(own, activation) * up


def activate(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the activation of each element."""
    if activation is Activation.SILU:
        return nn.functional.silu(gate)
    return nn.functional.gelu(gate, approximate="tanh")


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (weight * normed).to(x.dtype)
