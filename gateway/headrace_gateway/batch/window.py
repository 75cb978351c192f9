"""Limits the lines in the queue, and shares the limit fairly among the batches of a process.

A line takes one slot per 64 KiB of its size, or per 16 inputs, rounded up, because it and its answer are in the memory
of the process and of Redis. 16 embeddings of 1,024 numbers have 64 KiB.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from headrace_gateway.batch.line import BatchLine
from headrace_gateway.batch.line_request import LineAnswer, LineRequests, LineStoppedError
from headrace_gateway.requests.body import SMALL_BYTES

_SLOT_INPUTS: Final = 16


class SharedWindow:
    """Slots for lines. Free slots go to the waiting batch that holds the fewest.

    Args:
        size: slots in total.
        least: a batch with fewer slots than this gets the slots of its next line even if none are free. So a batch
            whose model has no worker cannot block the others.
    """

    def __init__(self, size: int, least: int = 1) -> None:
        self._size: Final = size
        self._least: Final = least
        self._num_taken = 0
        self._waiting: Final[dict[Share, tuple[int, asyncio.Future[None]]]] = {}
        """For each waiting share, the number of slots that it waits for, and the future that `_grant` sets."""

    def share(self) -> "Share":
        """Return the share of one batch; `close` it at the end."""
        return Share(self)

    async def acquire(self, share: "Share", count: int) -> None:
        """Wait for `count` slots."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[share] = count, granted
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.release(share, count)
            raise
        finally:
            del self._waiting[share]

    def release(self, share: "Share", count: int) -> None:
        share.num_taken -= count
        self._num_taken -= count
        self._grant()

    def _grant(self) -> None:
        for share in sorted(self._waiting, key=_num_taken):
            count, granted = self._waiting[share]
            if granted.done():
                continue
            if self._num_taken + count > self._size and share.num_taken >= self._least:
                return
            share.num_taken += count
            self._num_taken += count
            granted.set_result(None)


class Share:
    """The slots of one batch. One task at a time may wait for slots."""

    def __init__(self, window: SharedWindow) -> None:
        self._window: Final = window
        self.num_taken = 0

    async def acquire(self, count: int) -> None:
        await self._window.acquire(self, count)

    def release(self, count: int) -> None:
        self._window.release(self, count)

    def close(self) -> None:
        """Release the slots that are still held."""
        self._window.release(self, self.num_taken)


def _num_taken(share: Share) -> int:
    return share.num_taken


def _slots(line: BatchLine) -> int:
    return max(-(-len(line.raw) // SMALL_BYTES), -(-line.num_inputs // _SLOT_INPUTS))


async def answer_lines(
    lines: AsyncIterator[tuple[int, BatchLine]],
    requests: LineRequests,
    share: Share,
    deliver: Callable[[int, LineAnswer], Awaitable[None]],
) -> None:
    """Send the lines and deliver each answer. A line holds its slots until its answer is delivered.

    A stopped line is not delivered. The first error of a line or of `deliver` ends all lines.
    """

    async def answer(number: int, line: BatchLine) -> None:
        with contextlib.suppress(LineStoppedError):  # the batch writes its error
            await deliver(number, await requests.answer(line))
        share.release(_slots(line))

    try:
        async with asyncio.TaskGroup() as group:
            async for number, line in lines:
                await share.acquire(_slots(line))
                group.create_task(answer(number, line))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
