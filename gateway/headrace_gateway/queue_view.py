"""`QueueView`: the levels of all queues as plain data, read from Redis at most once a second for all who ask."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from headrace_broker import AsyncClient, QueueLevels
from headrace_broker.messages import name_problems

_FRESH_SECONDS: Final = 1.0


@dataclass(slots=True)
class QueueView:
    """Every replica reads for itself."""

    client: AsyncClient
    now: Callable[[], float] = time.monotonic
    _queues: list[dict[str, Any]] = field(default_factory=list)
    _read_at: float | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def all(self) -> list[dict[str, Any]]:
        """One entry a model, by name. Raises QueueUnavailableError where Redis cannot be asked."""
        async with self._lock:
            if self._read_at is None or self.now() - self._read_at >= _FRESH_SECONDS:
                models = await self.client.models()
                names = sorted(name for name in models if not name_problems("model", name))  # anybody can write there
                levels = await self.client.queue_levels(names)
                legible = [name for name, level in levels.items() if level.problem is None]
                tenants = await self.client.queue_tenants(legible)
                self._queues = [
                    {
                        **_levels(name, level, tenants.get(name, {})),
                        "max_model_len": models[name].max_model_len,
                        "worker": models[name].worker,
                        "seen": models[name].seen,
                    }
                    for name, level in levels.items()
                ]
                self._read_at = self.now()
            return self._queues


def _levels(model: str, level: QueueLevels, tenants: Mapping[str, int]) -> dict[str, Any]:
    return {
        "model": model,
        "waiting": level.num_ready,
        "by_priority": {str(step): count for step, count in level.ready.items()},
        "by_tenant": dict(sorted(tenants.items())),
        "delayed": level.delayed,
        "running": level.leased - level.delayed,
        "run_out": level.run_out,
        "dead": level.num_dead,
        "oldest_age_seconds": level.oldest_age_seconds,
        "problem": level.problem,
    }
