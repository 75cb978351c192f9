"""`QueueView`: the state of all queues as plain data. All callers share one read of Redis a second."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from headrace_broker import AsyncClient, QueueLevels
from headrace_broker.messages import name_problems
from headrace_gateway.shared_read import SharedRead


class QueueView:
    """Each replica reads for itself."""

    def __init__(self, client: AsyncClient, now: Callable[[], float] = time.monotonic) -> None:
        self._client: Final = client
        self._queues = SharedRead(self._read, now)

    async def all(self) -> list[dict[str, Any]]:
        """Return one entry per model, sorted by name. Raises QueueUnavailableError if Redis is unavailable."""
        return await self._queues.get()

    async def _read(self) -> list[dict[str, Any]]:
        models = await self._client.models()
        names = sorted(name for name in models if not name_problems("model", name))  # any producer can write it
        levels = await self._client.queue_levels(names)
        legible = [name for name, level in levels.items() if level.problem is None]
        tenants = await self._client.queue_tenants(legible)
        return [
            {
                **_levels(name, level, tenants.get(name, {})),
                "max_model_len": models[name].max_model_len,
                "worker": models[name].worker,
                "seen": models[name].seen,
            }
            for name, level in levels.items()
        ]


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
