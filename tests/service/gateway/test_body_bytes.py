"""How many bytes of bodies one key may send at a time."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from headrace_broker.server.embedded import EmbeddedServer
from headrace_gateway.keys.limits import BODIES_AT_ONCE
from headrace_gateway.requests.body import SMALL_BYTES
from service.gateway.in_process import bearer, running_app, write_keys

LARGE = b'{"model": "absent"}'.ljust(2 * SMALL_BYTES)
BODY = b'{"model": "absent"}'.rjust(1024)


class Slow:
    """A body that arrives when `let_go` is set."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.is_read = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield BODY[:-1]
        self.is_read.set()
        await self.let_go.wait()
        yield BODY[-1:]


async def test_bodies_of_one_key_beyond_its_room_are_refused_unread_and_those_of_others_are_not(
    redis_server: EmbeddedServer, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys", "greedy", "other")
    async with running_app(redis_server.url, keys=tmp_path / "keys", max_body_bytes=len(BODY)) as (_, http):

        async def post(key: str, body: Any = BODY, **headers: str) -> tuple[int, str]:
            named = {"Content-Type": "application/json", **bearer(keys[key]), **headers}
            found = await http.post("/v1/chat/completions", content=body, headers=named)
            return found.status_code, found.json()["error"]["code"]

        named, chunked = [Slow() for _ in range(BODIES_AT_ONCE // 2)], [Slow() for _ in range(BODIES_AT_ONCE // 2)]
        length = {"Content-Length": str(len(BODY))}
        sent = [asyncio.create_task(post("greedy", body, **length)) for body in named]
        sent += [asyncio.create_task(post("greedy", body)) for body in chunked]
        for slow in named + chunked:
            await slow.is_read.wait()
        refused = Slow()
        assert await post("greedy", refused, **length) == (429, "body_bytes_exceeded")
        assert not refused.is_read.is_set()
        assert await post("greedy", Slow()) == (429, "body_bytes_exceeded")
        assert await post("other") == (404, "model_not_found")
        for slow in named + chunked:
            slow.let_go.set()
        assert {await each for each in sent} == {(404, "model_not_found")}
        assert await post("greedy") == (404, "model_not_found")


async def test_one_large_body_of_a_key_at_a_time_is_read_and_sent(redis_server: EmbeddedServer, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", "greedy", "other")
    async with running_app(redis_server.url, keys=tmp_path / "keys") as (app, http):

        async def post(key: str, body: bytes) -> int:
            named = {"Content-Type": "application/json", **bearer(keys[key])}
            status: int = (await http.post("/v1/chat/completions", content=body, headers=named)).status_code
            return status

        async with app.state.gateway.bodies.turn("greedy"):
            waiting = asyncio.create_task(post("greedy", LARGE))
            assert await post("other", LARGE) == 404
            assert await post("greedy", BODY) == 404
            assert not waiting.done()
        assert await waiting == 404
