"""`ElementwiseOps`: the operations of a decoder layer between its matrix products.

There are three implementations: `native_ops` for the CPU, `triton_ops` for a GPU, and `torch_ops` for any device.
"""

from dataclasses import dataclass
from typing import Any, Protocol

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


@dataclass(frozen=True, slots=True)
class Norm:
    """A root mean square norm. `weight` [features] has the type of the activations."""

    weight: torch.Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> "Norm | None":
        """Return the parameters of a module that may be such a norm, or None if it cannot be one."""
        weight = getattr(module, "weight", None)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if weight is None or eps is None or weight.dim() != 1 or getattr(module, "bias", None) is not None:
            return None
        return cls(weight.detach(), float(eps))
