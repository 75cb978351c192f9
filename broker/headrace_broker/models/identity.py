"""`ModelIdentity`: the weights that compute a request. The start entry of its stream carries it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """A model, identified by fingerprints. An empty fingerprint is unknown and matches any other.

    The name is not compared. Messages for people show it.
    """

    name: str
    """The name under which the worker serves it."""
    weights: str = ""
    """Fingerprint of the checkpoint."""
    lora: str = ""
    """Fingerprint of the request's LoRA adapter."""

    def differs_from(self, other: Self) -> bool:
        """Return whether tokens of the two must not be mixed in one answer."""
        pairs = ((self.weights, other.weights), (self.lora, other.lora))
        return any(mine and theirs and mine != theirs for mine, theirs in pairs)

    def __str__(self) -> str:
        adapter = f", adapter {self.lora}" if self.lora else ""
        return f"{self.name} (weights {self.weights or 'unknown'}{adapter})"

    def to_wire(self) -> dict[str, str]:
        """Return the items that it adds to the data of a start entry."""
        known = {"model": self.name, "weights": self.weights, "lora": self.lora}
        return {key: value for key, value in known.items() if value}

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Self | None:
        """Read it from the data of a start entry; None if the worker did not give it."""
        if not isinstance(data.get("model"), str):
            return None
        parts = (data.get(key) for key in ("weights", "lora"))
        return cls(data["model"], *(part if isinstance(part, str) else "" for part in parts))
