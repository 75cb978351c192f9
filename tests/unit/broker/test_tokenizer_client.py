"""Tokenizer calls time out even if a cancellation is lost, as in asyncio.wait_for of Python 3.11."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

from headrace_broker.client.tokenizer_calls import MAX_CALLS_PER_CLIENT, MAX_CALLS_PER_KEY, TokenizerClient
from headrace_broker.errors import TokenizerCallError


class LosingClient:
    """Never answers, and loses a cancellation that arrives during the given command."""

    def __init__(self, losing: str) -> None:
        self.losing = losing
        self.has_lost = False

    def register_script(self, _: str) -> Any:
        async def push(**_: Any) -> int:
            await self._lose("push")
            return 1

        return push

    async def blpop(self, _: Sequence[str], timeout: float) -> None:
        assert timeout > 0
        await self._lose("blpop")

    async def _lose(self, command: str) -> None:
        assert not self.has_lost, "it waits again after its timeout"
        if command == self.losing:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            self.has_lost = True


@pytest.mark.parametrize("losing", ["push", "blpop"])
async def test_calls_time_out_although_their_cancellation_was_lost(losing: str) -> None:
    client: Any = LosingClient(losing)
    tokenizer = TokenizerClient(client, seconds=0.05)
    async with asyncio.timeout(60):
        calls = (tokenizer.call("m", "count", {}, key=str(number)) for number in range(MAX_CALLS_PER_CLIENT))
        ended = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(error) for error in ended} == {TokenizerCallError}


async def test_calls_of_one_key_do_not_block_other_keys() -> None:
    pushed: list[bytes] = []

    class SilentClient(LosingClient):
        def register_script(self, _: str) -> Any:
            async def push(args: Sequence[Any], **_: Any) -> int:
                pushed.append(args[0].rpartition(b"|")[2])
                return 1

            return push

    client: Any = SilentClient("blpop")
    tokenizer = TokenizerClient(client)
    greedy = [
        asyncio.create_task(tokenizer.call("m", "count", {"a": 1}, key="greedy")) for _ in range(MAX_CALLS_PER_CLIENT)
    ]
    other = asyncio.create_task(tokenizer.call("m", "count", {"b": 1}, key="other"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert [b"b" in body for body in pushed] == [False] * MAX_CALLS_PER_KEY + [True]
    calls = [*greedy, other]
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
