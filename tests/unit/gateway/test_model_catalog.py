"""A name that is not among the known models is looked for again: its worker may have started a moment ago."""

from typing import Any

import pytest

from headrace_broker import RegisteredModel
from headrace_gateway.errors import ApiError
from headrace_gateway.keys.api_key import ApiKey
from headrace_gateway.keys.model_catalog import ModelCatalog


class Models:
    """A client that counts the reads."""

    def __init__(self) -> None:
        self.num_read = 0
        self.names: list[str] = []

    async def models(self) -> dict[str, RegisteredModel]:
        self.num_read += 1
        return {name: RegisteredModel(name, 64, 5.0, "worker@host") for name in self.names}


async def test_a_model_is_found_soon_after_its_worker_started() -> None:
    client: Any = Models()
    times = [0.0]
    catalog = ModelCatalog(client, now=lambda: times[0])
    with pytest.raises(ApiError):
        await catalog.find("m", ApiKey("web"))
    client.names = ["m"]
    times[0] = 0.2
    model, adapter = await catalog.find("m", ApiKey("web"))
    assert (model.name, adapter) == ("m", None)


async def test_unknown_names_do_not_make_each_request_read_redis() -> None:
    client: Any = Models()
    catalog = ModelCatalog(client, now=lambda: 0.0)
    for number in range(100):
        with pytest.raises(ApiError):
            await catalog.find(f"unknown {number}", ApiKey("web"))
    assert client.num_read == 1
