"""`ElementwiseOps`: the operations of a decoder layer between its matrix products.

There are three implementations: `native_ops` for the CPU, `triton_ops` for a GPU, and `torch_ops` for any device.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch


class Activation(IntEnum):
    """The activation of a gate. The numbers are those in vectors.h."""

    SILU = 0
    GELU_TANH = 1


class ElementwiseOps(Protocol):
    """All tensors of a call have one type, float32 or bfloat16. They are contiguous and 2D: [tokens, features].

    Weights of norms are float32.
    """

    def add_rms_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `delta`, if given, to hidden in place. Return the root mean square norm of hidden."""
        ...

    def add_normed(self, hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """Add the root mean square norm of delta to hidden, in place."""
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

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """[tokens, gate | up] -> activation of gate * up, [tokens, half the features]."""
        ...


def heads_together(q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, head_dim: int) -> bool:
    """Whether the norms of queries and keys have a row of all heads together. Otherwise each head is a row."""
    return any(weight is not None and weight.shape[0] != head_dim for weight in (q_weight, k_weight))


@dataclass(frozen=True, slots=True)
class Norm:
    """A root mean square norm. `weight` [features] is float32, and contains what the module adds to its own weight."""

    weight: torch.Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> "Norm | None":
        """Return the parameters of a module if it computes such a norm of a few numbers, otherwise None.

        A module may multiply by its weight, or by its weight plus one (Gemma).
        """
        weight = getattr(module, "weight", None)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if weight is None or eps is None or weight.dim() != 1 or getattr(module, "bias", None) is not None:
            return None
        own = weight.detach().float()
        numbers = torch.sin(torch.arange(1.0, len(own) + 1, device=own.device))[None]
        try:
            # in float32: the rounding of bfloat16 hides the plus one of large weights
            found = torch.func.functional_call(module, {"weight": own}, (numbers,))
        except (RuntimeError, TypeError):  # it is called in another way
            return None
        normed = numbers * torch.rsqrt(numbers.pow(2).mean() + float(eps))
        for shifted in (own, own + 1.0):
            if _equal_up_to_rounding(found, normed * shifted):
                return cls(shifted, float(eps))
        return None

    def scaled(self, factor: float) -> "Norm":
        """Return a norm whose output is `factor` times that of this one."""
        return self if factor == 1.0 else Norm(self.weight * factor, self.eps)


def _equal_up_to_rounding(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).norm() <= 1e-5 * other.norm())
