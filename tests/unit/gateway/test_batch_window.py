"""How the batches of a process share the lines in the queue."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace_gateway.batch.line import BatchLine
from headrace_gateway.batch.line_request import LineAnswer
from headrace_gateway.batch.window import SharedWindow, answer_lines
from headrace_gateway.requests.body import SMALL_BYTES


def line(size: int) -> BatchLine:
    return BatchLine("a", "/v1/chat/completions", "m", "batch_req_a", b" " * size)


class Requests:
    """Answers when the test lets it."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.answered = asyncio.Semaphore(0)

    async def answer(self, line: BatchLine) -> LineAnswer:
        self.sizes.append(len(line.raw))
        await self.answered.acquire()
        self.sizes.remove(len(line.raw))
        return LineAnswer(b"", True)


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_large_lines_take_as_many_slots_as_their_bytes_need() -> None:
    requests: Any = Requests()
    sizes = [1, 2 * SMALL_BYTES, 2 * SMALL_BYTES + 1, SMALL_BYTES, 5 * SMALL_BYTES, 3]

    async def lines() -> AsyncIterator[tuple[int, BatchLine]]:
        for number, size in enumerate(sizes):
            yield number, line(size)

    async def deliver(_number: int, _answer: LineAnswer) -> None: ...

    share = SharedWindow(4).share()
    sending = asyncio.create_task(answer_lines(lines(), requests, share, deliver))
    seen = []
    while not sending.done():
        await settle()
        seen.append([*requests.sizes])
        requests.answered.release()
    await sending
    assert seen[0] == sizes[:2]
    assert max(sum(-(-size // SMALL_BYTES) for size in now) for now in seen) == 5  # the line that exceeds the window
    assert [sizes[4]] in seen
    assert share.num_taken == 0


async def test_a_batch_that_holds_nothing_is_not_kept_out_by_one_that_holds_all() -> None:
    window = SharedWindow(2)
    greedy, other = window.share(), window.share()
    await greedy.acquire(2)
    await other.acquire(3)
    waiting = asyncio.create_task(other.acquire(1))
    await settle()
    assert not waiting.done()
    greedy.close()
    await settle()
    assert not waiting.done()
    other.release(3)
    await waiting
    assert other.num_taken == 1


async def test_a_cancelled_wait_holds_no_slots() -> None:
    window = SharedWindow(2)
    share = window.share()
    await share.acquire(2)
    waiting = asyncio.create_task(share.acquire(2))
    await settle()
    share.release(2)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert share.num_taken == 0
