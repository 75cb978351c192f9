"""How a hub ends its running read when streams join it, with a client whose calls end when the test lets them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace_broker.streams.server_hub import ServerHub


class HeldClient:
    """Its pipelines wait until the test releases them."""

    def __init__(self) -> None:
        self.running: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()
        self.at_once = 0

    def pipeline(self, **_: Any) -> "HeldClient":
        return self

    async def __aenter__(self) -> "HeldClient":
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def xadd(self, *_: Any, **__: Any) -> None: ...

    def expire(self, *_: Any) -> None: ...

    async def execute(self) -> None:
        self.at_once += 1
        assert self.at_once == 1
        released = asyncio.get_running_loop().create_future()
        await self.running.put(released)
        await released
        self.at_once -= 1


@asynccontextmanager
async def held_hub() -> AsyncIterator[tuple[ServerHub, HeldClient]]:
    async def never() -> None:
        await asyncio.Event().wait()

    client: Any = HeldClient()
    hub = ServerHub("", client, client, never, 30.0)
    try:
        yield hub, client
    finally:
        await hub.aclose()


async def test_streams_that_join_during_a_wake_share_the_next_one() -> None:
    async with held_hub() as (hub, client):
        first = asyncio.create_task(hub.join({"first": None}))
        wake = await client.running.get()
        others = [asyncio.create_task(hub.join({str(number): None})) for number in range(50)]
        await asyncio.sleep(0)
        wake.set_result(None)
        await first  # it does not wait for those who came later
        (await client.running.get()).set_result(None)
        await asyncio.gather(*others)
        assert client.running.empty()


async def test_a_join_that_is_cancelled_leaves_the_wake_to_the_others() -> None:
    async with held_hub() as (hub, client):
        leaving, staying = [asyncio.create_task(hub.join({name: None})) for name in ("leaving", "staying")]
        wake = await client.running.get()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        wake.set_result(None)
        await staying
