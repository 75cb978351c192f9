"""`FairShare`: how a worker shares its queues among tenants. The scripts of `leases.py` do the sharing."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import msgpack

MAX_WEIGHT: Final = 1000.0


@dataclass(frozen=True, slots=True)
class FairShare:
    """What an operator says about tenants. A tenant without a weight has 1."""

    weights: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    ageing_seconds: float = 0.0
    """A message that has waited so long counts one priority step better, and so on; 0 never."""
    quota: int = 0
    """Messages of one tenant that may wait in a queue; what comes beyond is refused. 0 sets no bound."""

    prefix_affinity: bool = False
    """Of the tenant that is due, take first what begins as a prompt that this worker has had lately."""

    def packed(self, prefixes: Iterable[str] = ()) -> bytes:
        """For the scripts; `prefixes` are those that this worker holds."""
        policy: dict[str, Any] = {
            "weights": dict(self.weights),
            "ageing_seconds": self.ageing_seconds,
            "quota": self.quota,
            **({"prefixes": list(prefixes)} if self.prefix_affinity else {}),
        }
        packed: bytes = msgpack.packb(policy)
        return packed


def parse_weights(text: str) -> dict[str, float]:
    """Reads `acme=4,beta=0.5`. Raises ValueError, which says what is wrong."""
    weights: dict[str, float] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        tenant, separator, number = pair.rpartition("=")
        tenant = tenant.strip()
        if not separator or tenant in weights:
            raise ValueError(f"must be tenant=weight pairs, each tenant once, with commas between them, not {text!r}")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not 1 / MAX_WEIGHT <= weight <= MAX_WEIGHT:
            raise ValueError(f"the weight of {tenant!r} must be a number from 0.001 to 1000, not {number.strip()!r}")
        weights[tenant] = weight
    return weights
