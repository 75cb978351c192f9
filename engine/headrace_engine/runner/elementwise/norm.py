"""The parameters of a root mean square norm, read from the module of a model."""

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
        """Return the parameters of a module that may be such a norm, or None if it cannot be one."""
        weight = getattr(module, "weight", None)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if weight is None or eps is None or weight.dim() != 1 or getattr(module, "bias", None) is not None:
            return None
        return cls(weight.detach(), float(eps))
