"""Concurrent callers share one read of Redis."""

import asyncio

import pytest

from headrace_gateway.keys.model_catalog import SharedRead


class Source:
    """Answers when the test lets it, and counts the reads."""

    def __init__(self) -> None:
        self.num_read = 0
        self.may_answer = asyncio.Event()
        self.error: Exception | None = None

    async def read(self) -> int:
        self.num_read += 1
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return self.num_read


async def test_all_callers_of_a_failed_read_get_its_error() -> None:
    source = Source()
    source.error = ConnectionError()
    shared = SharedRead(source.read)
    waiting = [asyncio.create_task(shared.get()) for _ in range(50)]
    await asyncio.sleep(0)
    source.may_answer.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert source.num_read == 1
    assert all(isinstance(result, ConnectionError) for result in results)
    source.error = None
    assert await shared.get() == 2


async def test_a_cancelled_caller_does_not_cancel_the_read_of_the_others() -> None:
    source = Source()
    shared = SharedRead(source.read)
    leaver, stayer = asyncio.create_task(shared.get()), asyncio.create_task(shared.get())
    await asyncio.sleep(0)
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    source.may_answer.set()
    assert await stayer == 1
    assert source.num_read == 1


async def test_a_value_is_kept_for_a_second() -> None:
    source, times = Source(), [0.0]
    source.may_answer.set()
    shared = SharedRead(source.read, lambda: times[0])
    assert [await shared.get(), await shared.get()] == [1, 1]
    times[0] = 1.0
    assert await shared.get() == 2
