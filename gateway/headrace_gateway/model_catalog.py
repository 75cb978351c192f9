"""The models that requests may name: the registry of the queue, read at most once a second."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from headrace_broker import AsyncClient, RegisteredModel
from headrace_gateway.errors import ApiError
from headrace_gateway.keys import ApiKey

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

    async def find(self, name: object, key: ApiKey) -> tuple[RegisteredModel, str | None]:
        """The model that a request's `model` stands for, and the adapter where it is one's name.

        Raises ApiError 404 for a name that the key may not use, as for one that nobody serves.
        """
        if not isinstance(name, str) or not name:
            raise ApiError(400, "invalid_request_error", "invalid_request", "model must be a string", param="model")
        models = await self.all()
        if key.may_use(name):
            if name in models:
                return models[name], None
            for model in models.values():
                if name in model.loras:
                    return model, name
        shown = name[:64]
        message = f"the model {shown!r} does not exist, or this key may not use it"
        raise ApiError(404, "invalid_request_error", "model_not_found", message, param="model")
