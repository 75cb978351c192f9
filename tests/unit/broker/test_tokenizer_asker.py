"""Calls of a tokenizer end in time, also where a cancellation is lost, as asyncio.wait_for of Python 3.11 does."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

from headrace_broker.errors import TokenizerCallError
from headrace_broker.tokenizer_calls import MOST_OF_ASKER, TokenizerAsker


class LosingClient:
    """Nobody answers, and the cancellation is lost that comes while this command is under way."""

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
        assert not self.has_lost, "it waits again after its time"
        if command == self.losing:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            self.has_lost = True


@pytest.mark.parametrize("losing", ["push", "blpop"])
async def test_calls_fail_in_time_though_their_cancellation_was_lost(losing: str) -> None:
    client: Any = LosingClient(losing)
    asker = TokenizerAsker(client, seconds=0.05)
    async with asyncio.timeout(60):
        calls = (asker.call("m", "count", {}) for _ in range(MOST_OF_ASKER))
        ended = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(error) for error in ended} == {TokenizerCallError}
