"""The models that requests may name: the registry of the queue, read at most once a second."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from headrace_broker import AsyncClient, RegisteredModel

_FRESH_SECONDS: Final = 1.0


@dataclass(slots=True)
class ModelCatalog:
    """Registered models by served name; adapters are found by their own names."""

    client: AsyncClient
    now: Callable[[], float] = time.monotonic
    _models: dict[str, RegisteredModel] = field(default_factory=dict)
    _read_at: float | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def all(self) -> dict[str, RegisteredModel]:
        """Raises QueueUnavailableError where Redis cannot be asked."""
        async with self._lock:
            if self._read_at is None or self.now() - self._read_at > _FRESH_SECONDS:
                self._models = await self.client.models()
                self._read_at = self.now()
            return self._models
