"""The models that requests may name. The queue's registry is read at most once a second."""

from headrace_broker import AsyncClient, RegisteredModel
from headrace_gateway.broker_errors import unknown_model
from headrace_gateway.errors import invalid
from headrace_gateway.keys import ApiKey
from headrace_gateway.shared_read import SharedRead


class ModelCatalog:
    """Registered models by served name. Adapters are found by their own names."""

    def __init__(self, client: AsyncClient) -> None:
        self._models = SharedRead(client.models)

    async def all(self) -> dict[str, RegisteredModel]:
        """Return all models. Raises QueueUnavailableError if Redis is unavailable."""
        return await self._models.get()

    async def only(self, key: ApiKey) -> RegisteredModel | None:
        """Return the model for a request that names none; None if the key may use several models, or none."""
        usable = [model for name, model in (await self.all()).items() if key.may_use(name)]
        return usable[0] if len(usable) == 1 else None

    async def find(self, name: object, key: ApiKey) -> tuple[RegisteredModel, str | None]:
        """Return the model that a request's `model` refers to, and the adapter if it is the name of one.

        Raises ApiError 404 for a model that the key may not use, just as for one that does not exist.
        """
        if not isinstance(name, str) or not name:
            raise invalid("model must be a string", param="model")
        models = await self.all()
        if key.may_use(name):
            if name in models:
                return models[name], None
            for model in models.values():
                if name in model.loras:
                    return model, name
        raise unknown_model(name)
