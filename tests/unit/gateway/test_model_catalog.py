"""A name that is not among the known models is looked for again: its worker may have started a moment ago."""

from typing import Any

import pytest

from headrace_broker import LoadingModel, RegisteredModel
from headrace_gateway.errors import ApiError
from headrace_gateway.keys.api_key import ApiKey
from headrace_gateway.keys.model_catalog import ModelCatalog


class Models:
    """A client that counts the reads."""

    def __init__(self) -> None:
        self.num_read = 0
        self.names: list[str] = []
        self.loading: list[str] = []

    async def models(self) -> dict[str, RegisteredModel]:
        self.num_read += 1
        return {name: RegisteredModel(name, 64, 5.0, "worker@host") for name in self.names}

    async def loading_models(self) -> dict[str, LoadingModel]:
        return {name: LoadingModel(name, 0.4, 9.0, frozenset({"worker@host"})) for name in self.loading}


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


async def test_a_model_that_its_first_worker_is_loading_is_missing_with_a_reason_and_may_be_asked_for_again() -> None:
    client: Any = Models()
    client.loading = ["m"]
    catalog = ModelCatalog(client, now=lambda: 0.0)
    with pytest.raises(ApiError, match=r"'m' is loading \(40%\), and no worker has served it yet") as raised:
        await catalog.find("m", ApiKey("web"))
    assert (raised.value.status, raised.value.code) == (404, "model_not_found")
    assert raised.value.headers == {"x-should-retry": "true", "retry-after": "5"}
    with pytest.raises(ApiError, match="does not exist, or this key may not use it"):
        await catalog.find("m", ApiKey("other", models=frozenset({"n"})))
    assert await catalog.serving("generate", ApiKey("web")) == []
    assert await catalog.only(ApiKey("web")) is None


async def test_a_model_that_becomes_ready_between_the_two_reads_is_found() -> None:
    class Readied(Models):
        """The worker registers its model and deletes its report while a caller reads."""

        async def loading_models(self) -> dict[str, LoadingModel]:
            found = await super().loading_models()
            self.become_ready()
            return found

        async def models(self) -> dict[str, RegisteredModel]:
            found = await super().models()
            self.become_ready()
            return found

        def become_ready(self) -> None:
            self.names, self.loading = ["m"], []

    client: Any = Readied()
    client.loading = ["m"]
    catalog = ModelCatalog(client, now=lambda: 0.0)
    registered, _ = await catalog.known()
    assert set(registered) == {"m"}
    model, _ = await catalog.find("m", ApiKey("web"))
    assert model.name == "m"


async def test_a_model_that_was_served_before_takes_requests_while_it_is_loading() -> None:
    client: Any = Models()
    client.names = client.loading = ["m"]
    catalog = ModelCatalog(client, now=lambda: 0.0)
    assert set((await catalog.known()).loading) == {"m"}
    model, _ = await catalog.find("m", ApiKey("web"))
    assert model.name == "m"
