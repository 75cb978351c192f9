"""The parameters of a root-mean-square norm, read from whatever module a model has for it."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Norm:
    """weight [features], of the activations' type."""

    weight: torch.Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> "Norm | None":
        """Those of a module that may be such a norm; None where it cannot be."""
        weight = getattr(module, "weight", None)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if weight is None or eps is None or weight.dim() != 1 or getattr(module, "bias", None) is not None:
            return None
        return cls(weight.detach(), float(eps))
