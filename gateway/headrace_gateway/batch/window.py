"""Limits the lines in the queue, and shares the limit fairly among the batches of a process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from headrace_gateway.batch.line_request import LineAnswer, LineRequests, LineStoppedError
from headrace_gateway.batch_line import BatchLine


class SharedWindow:
    """Slots for lines. A free slot goes to the waiting batch that holds the fewest.

    Args:
        size: slots in total.
        least: slots that a batch gets even if the others hold all, so that a batch whose model has no worker cannot
            block the others.
    """

    def __init__(self, size: int, least: int = 1) -> None:
        self._size: Final = size
        self._least: Final = least
        self._num_taken = 0
        self._waiting: Final[dict[Share, asyncio.Future[None]]] = {}

    def share(self) -> "Share":
        """Return the share of one batch; `close` it at the end."""
        return Share(self)

    async def acquire(self, share: "Share") -> None:
        """Wait for a slot."""
        self._waiting[share] = asyncio.get_running_loop().create_future()
        self._grant()
        try:
            await self._waiting[share]
        except asyncio.CancelledError:
            if self._waiting[share].done() and not self._waiting[share].cancelled():
                self.release(share, 1)
            raise
        finally:
            del self._waiting[share]

    def release(self, share: "Share", count: int) -> None:
        share.num_taken -= count
        self._num_taken -= count
        self._grant()

    def _grant(self) -> None:
        waiting = sorted((share for share, slot in self._waiting.items() if not slot.done()), key=_num_taken)
        for share in waiting:
            if self._num_taken >= self._size and share.num_taken >= self._least:
                return
            share.num_taken += 1
            self._num_taken += 1
            self._waiting[share].set_result(None)


class Share:
    """The slots of one batch. One task at a time may wait for a slot."""

    def __init__(self, window: SharedWindow) -> None:
        self._window: Final = window
        self.num_taken = 0

    async def acquire(self) -> None:
        await self._window.acquire(self)

    def release(self) -> None:
        self._window.release(self, 1)

    def close(self) -> None:
        """Release the slots that are still held."""
        self._window.release(self, self.num_taken)


def _num_taken(share: Share) -> int:
    return share.num_taken


async def answer_lines(
    lines: AsyncIterator[tuple[int, BatchLine]],
    requests: LineRequests,
    share: Share,
    deliver: Callable[[int, LineAnswer], Awaitable[None]],
) -> None:
    """Send the lines and deliver each answer. A line holds its slot until its answer is delivered.

    A stopped line is not delivered. The first error of a line or of `deliver` ends all lines.
    """

    async def answer(number: int, line: BatchLine) -> None:
        with contextlib.suppress(LineStoppedError):  # the batch writes its error
            await deliver(number, await requests.answer(line))
        share.release()

    try:
        async with asyncio.TaskGroup() as group:
            async for number, line in lines:
                await share.acquire()
                group.create_task(answer(number, line))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
