"""`ElementwiseOps` in plain torch, for a device without Triton and for tests.

Results are rounded to the type of the data at the same places as in transformers.
"""

import torch
from torch import nn


def add_rms_norm(hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `delta`, if given, to hidden in place. Return the root mean square norm (Zhang and Sennrich 2019)."""
    if delta is not None:
        hidden += delta
    return _rms_norm(hidden, weight, eps)


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
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    for part, weight in ((heads[:, :q_heads], q_weight), (heads[:, q_heads : q_heads + k_heads], k_weight)):
        if weight is not None:
            part.copy_(_rms_norm(part, weight, eps))
        if cosine is not None and sine is not None:
            turning = part[..., : cosine.shape[-1]]
            first, second = turning.chunk(2, dim=-1)
            turning.copy_(turning * cosine[:, None] + torch.cat((-second, first), dim=-1) * sine[:, None])


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[tokens, gate | up] -> silu(gate) * up, [tokens, half the features] (SwiGLU, Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
