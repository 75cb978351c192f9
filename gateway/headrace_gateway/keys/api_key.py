"""API keys: the caller, its tenant and its rights. The key file contains only their hashes."""

import re
from dataclasses import dataclass
from typing import Final

NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""The names that an operator gives to keys and to webhook endpoints."""

URGENT_PRIORITY: Final = 3
"""That of a request with a due time which must start now."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An entry of the key file, or the only caller of a gateway without keys."""

    name: str
    """Appears in logs and metrics; the key itself does not."""
    tenant: str | None = None
    best_priority: int = 0
    """Default and highest priority of the key's requests. 0 is the highest, 9 the lowest."""
    models: frozenset[str] | None = None
    """Served names and adapters that it may use; None: all."""
    is_admin: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None

    @property
    def cache_salt(self) -> str | None:
        """The salt of the prefix cache. The keys of a tenant share one cache; a key without a tenant has its own."""
        return f"key {self.name}" if self.tenant is None else None

    @property
    def may_be_urgent(self) -> bool:
        """Whether a request with a due time may move up when it must start. Then it preempts those of steps 6 and 9."""
        return self.best_priority <= URGENT_PRIORITY

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


ANYONE = ApiKey(name="anyone", is_admin=True)
"""The caller of a gateway without a key file, which listens on loopback only."""
