"""`FairShare`: a worker's settings for sharing its queues among tenants. The scripts of `leases.py` apply them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import msgpack

MAX_WEIGHT: Final = 1000.0
ARRIVAL: Final = "arrival"
DEADLINE: Final = "deadline"
UNKNOWN_TOKEN_SECONDS: Final = 0.05
"""The expected time of one token of a request until a worker has measured it: that of a slow engine."""
ORDERS: Final = (ARRIVAL, DEADLINE)
"""Orders of the messages of one tenant: by arrival, or by `expires`."""


@dataclass(frozen=True, slots=True)
class FairShare:
    """The operator's settings for tenants. A tenant without a weight has the weight 1."""

    weights: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    ageing_seconds: float = 0.0
    """A message moves up one priority step each time it has waited for this long; 0: never."""
    quota: int = 0
    """Most messages of one tenant that may wait in a queue; more are refused. 0: no limit."""
    prefix_affinity: bool = False
    """Of the next tenant's messages, prefer one with the prompt prefix of a recent message of this worker."""

    order: str = ARRIVAL
    """One of `ORDERS`."""
    prefix_grace: float = 0.0
    """With prefix affinity: for so many seconds a conversation's next request waits for the worker that took the last
    one, if that worker has a free slot. 0: it waits for no worker."""

    @property
    def has_grace(self) -> bool:
        """Whether requests wait for the worker that has their conversation."""
        return self.prefix_affinity and self.prefix_grace > 0

    def packed(
        self, prefixes: Iterable[str] = (), token_seconds: float | None = None, away: Iterable[str] = ()
    ) -> bytes:
        """Return the settings as msgpack for the scripts.

        Args:
            prefixes: the recent prefixes of this worker.
            token_seconds: the time in which one request gets one token; None if it is not measured.
            away: the stream servers that this worker cannot write to.
        """
        away = dict.fromkeys(away, True)
        policy: dict[str, Any] = {
            "weights": dict(self.weights),
            "ageing_seconds": self.ageing_seconds,
            "quota": self.quota,
            "order": self.order,
            "token_microseconds": 1e6 * (UNKNOWN_TOKEN_SECONDS if token_seconds is None else token_seconds),
            **({"prefixes": list(prefixes)} if self.prefix_affinity else {}),
            **({"grace": self.prefix_grace * 1e6} if self.has_grace else {}),
            **({"away": away} if away else {}),
        }
        packed: bytes = msgpack.packb(policy)
        return packed


def parse_weights(text: str) -> dict[str, float]:
    """Parse a text such as `acme=4,beta=0.5`. Raises ValueError with the reason."""
    weights: dict[str, float] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        tenant, separator, number = pair.rpartition("=")
        tenant = tenant.strip()
        if not separator or tenant in weights:
            raise ValueError(f"must be comma-separated tenant=weight pairs, each tenant once, not {text!r}")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not 1 / MAX_WEIGHT <= weight <= MAX_WEIGHT:
            raise ValueError(f"the weight of {tenant!r} must be a number from 0.001 to 1000, not {number.strip()!r}")
        weights[tenant] = weight
    return weights
