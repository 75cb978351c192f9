"""How often the queues are read for the callers of the overview."""

import asyncio
from typing import Any

from headrace_broker import QueueLevels, RegisteredModel
from headrace_gateway.keys.model_catalog import QueueView


class Queues:
    """A client that counts the reads."""

    def __init__(self, problem: str | None = None) -> None:
        self.num_read = 0
        self.problem = problem
        self.tenants_of: list[str] = []

    async def models(self) -> dict[str, RegisteredModel]:
        self.num_read += 1
        await asyncio.sleep(0)
        return {name: RegisteredModel(name, 64, 5.0, "worker@host") for name in ("m", "no\nname", "a" * 10_000)}

    async def queue_levels(self, models: list[str]) -> dict[str, QueueLevels]:
        return {name: QueueLevels({0: 1}, 0, 0, {}, None, problem=self.problem) for name in models}

    async def queue_tenants(self, models: list[str]) -> dict[str, dict[str, int]]:
        self.tenants_of += models
        return {name: {"b": 1, "a": 2} for name in models}


def view(client: Any, times: list[float]) -> QueueView:
    return QueueView(client, now=lambda: times[0])


async def test_callers_within_a_second_share_one_read() -> None:
    client, times = Queues(), [0.0]
    looked = view(client, times)
    answers = await asyncio.gather(*(looked.all() for _ in range(20)))
    times[0] = 0.9
    await looked.all()
    assert client.num_read == 1
    assert [queue["by_tenant"] for queue in answers[0]] == [{"a": 2, "b": 1}]
    times[0] = 1.0
    await looked.all()
    assert client.num_read == 2


async def test_an_invalid_model_name_in_the_registry_is_skipped() -> None:
    assert [queue["model"] for queue in await view(Queues(), [0.0]).all()] == ["m"]


async def test_tenants_of_an_unreadable_queue_are_not_read() -> None:
    client = Queues("a key holds a string")
    [queue] = await view(client, [0.0]).all()
    assert queue["problem"] == "a key holds a string"
    assert client.tenants_of == []
