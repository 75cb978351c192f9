"""`ElementwiseOps`: what a decoder layer computes between its matrix products.

There are three implementations: `native_ops` for the CPU, `triton_ops` for a GPU, and `torch_ops` for any device.
"""

from typing import Protocol

import torch


class ElementwiseOps(Protocol):
    """All tensors of a call have one type, float32 or bfloat16. They are contiguous and 2D: [tokens, features]."""

    def add_rms_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `delta`, if given, to hidden in place. Return the root mean square norm of hidden."""
        ...

    def norm_rope(
        self,
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
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[tokens, gate | up] -> silu(gate) * up, [tokens, half the features]."""
        ...
