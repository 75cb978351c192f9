"""The models that requests may name, and the state of their queues. All requests of a replica share what it reads."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

from headrace_broker import AsyncClient, LoadingModel, RegisteredModel
from headrace_gateway.errors import ModelLoadingError, invalid
from headrace_gateway.http.broker_errors import unknown_model
from headrace_gateway.keys.api_key import ApiKey
from headrace_wire.codes import ErrorCode
from headrace_wire.pooling import wrong_task
from headrace_wire.request import name_problems

_LISTED: Final = "GET /v1/models lists the models"
_PATHS: Final = {
    "generate": "/v1/chat/completions",
    "decide": "/v1/decisions",
    "embed": "/v1/embeddings",
    "score": "/v1/rerank",
    "classify": "/v1/classify",
}
"""Where each task is served."""
_FRESH_SECONDS: Final = 1.0
_MISSED_SECONDS: Final = 0.1
"""After how long the models are read again for a name that is not among them: its worker may have just started."""

Value = TypeVar("Value")


class SharedRead(Generic[Value]):
    """A value that all callers share, and that is read at most once a second for those who accept an old one.

    A caller that arrives during a read gets the result of that read, even if it is an error. So an unavailable server
    is asked once.
    """

    def __init__(self, read: Callable[[], Awaitable[Value]], now: Callable[[], float] = time.monotonic) -> None:
        self._read: Final = read
        self._now: Final = now
        self._reading: asyncio.Task[Value] | None = None
        self._read_at: float | None = None

    async def get(self, oldest: float = _FRESH_SECONDS) -> Value:
        """Return the value, which is at most `oldest` seconds old. Raises the error of the read."""
        if self._reading is None or (self._reading.done() and not self._is_fresh(oldest)):
            self._read_at = None
            self._reading = asyncio.create_task(self._read_once())
        return await asyncio.shield(self._reading)  # a cancelled caller does not cancel the read for the others

    def _is_fresh(self, oldest: float) -> bool:
        return self._read_at is not None and self._now() - self._read_at < oldest

    async def _read_once(self) -> Value:
        value = await self._read()
        self._read_at = self._now()
        return value


class KnownModels(NamedTuple):
    """The models of one read, by served name."""

    registered: dict[str, RegisteredModel]
    """All that were ever served."""
    loading: dict[str, LoadingModel]
    """Those that workers are loading and that no other worker serves. Some may never have been served before."""


class ModelCatalog:
    """Registered models by served name. Adapters are found by their own names."""

    def __init__(self, client: AsyncClient, now: Callable[[], float] = time.monotonic) -> None:
        self._client: Final = client
        self._known = SharedRead(self._read, now)

    async def _read(self) -> KnownModels:
        # The loading models first: a worker registers its model before it deletes its report. In the other order a
        # model that becomes ready between the two reads would be in neither.
        loading = await self._client.loading_models()
        models, now = await self._client.models(), time.time()
        not_served = {name: model for name, model in loading.items() if not model.is_served(models.get(name), now)}
        return KnownModels(models, not_served)

    async def known(self) -> KnownModels:
        """Return all models, and which of them are loading. Raises QueueUnavailableError if Redis is unavailable."""
        return await self._known.get()

    async def all(self) -> dict[str, RegisteredModel]:
        """Return all models that were ever served. Raises QueueUnavailableError if Redis is unavailable."""
        return (await self.known()).registered

    async def only(self, key: ApiKey) -> RegisteredModel | None:
        """Return the model for a request that names none; None if the key may use several models, or none."""
        usable = [model for name, model in (await self.all()).items() if key.may_use(name)]
        return usable[0] if len(usable) == 1 else None

    async def serving(self, task: str, key: ApiKey) -> list[str]:
        """Return the names of the models that serve a task and that the key may use."""
        return sorted(name for name, model in (await self.all()).items() if task in model.tasks and key.may_use(name))

    async def find(
        self, name: str | None, key: ApiKey, task: str | None = "generate"
    ) -> tuple[RegisteredModel, str | None]:
        """Return the model for a request's `model`, and the adapter if `model` is the name of an adapter.

        Args:
            task: `generate`, `decide` or a pooling task, which the model must serve; None: any.

        Raises ApiError 404 for a model that the key may not use, just as for one that does not exist, and for one
        that its first worker is still loading; 400 for a model that does not serve the task.
        """
        if name is None:
            raise invalid(f"model is required: {_LISTED}", param="model")
        if not name:
            raise invalid(f"model must not be empty: {_LISTED}", param="model")
        if not key.may_use(name):
            raise unknown_model(name)
        found = _find(name, await self.all())
        if found is None:
            latest = await self._known.get(_MISSED_SECONDS)
            found, loading = _find(name, latest.registered), latest.loading.get(name)
        if found is None:
            raise unknown_model(name) if loading is None else ModelLoadingError(name, loading.progress)
        model, adapter = found
        if adapter is None and task is not None and task not in model.tasks:
            raise invalid(wrong_task(name, model.tasks, task, _PATHS), code=ErrorCode.UNSUPPORTED, param="model")
        return model, adapter


def _find(name: str, models: Mapping[str, RegisteredModel]) -> tuple[RegisteredModel, str | None] | None:
    """Return the model of this name, or the model that has an adapter of this name, and the adapter."""
    if name in models:
        return models[name], None
    return next(((model, name) for model in models.values() if name in model.loras), None)


class QueueView:
    """The state of all queues as plain data."""

    def __init__(self, client: AsyncClient, now: Callable[[], float] = time.monotonic) -> None:
        self._client: Final = client
        self._queues = SharedRead(self._read, now)

    async def all(self) -> list[dict[str, Any]]:
        """Return one entry per model, sorted by name. Raises QueueUnavailableError if Redis is unavailable."""
        return await self._queues.get()

    async def _read(self) -> list[dict[str, Any]]:
        models = await self._client.models()
        names = sorted(name for name in models if not name_problems("model", name))  # any producer can write names
        levels = await self._client.queue_levels(names)
        legible = [name for name, level in levels.items() if level.problem is None]
        tenants = await self._client.queue_tenants(legible)
        return [
            {
                "model": name,
                **level.summary(tenants.get(name, {})),
                "run_out": level.run_out,
                "max_model_len": models[name].max_model_len,
                "worker": models[name].worker,
                "seen": models[name].seen,
            }
            for name, level in levels.items()
        ]
