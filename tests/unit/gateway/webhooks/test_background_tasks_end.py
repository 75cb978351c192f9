"""Background tasks end with the server, even if asyncio.wait_for of Python 3.11 loses a cancellation."""

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

import pytest

from headrace_gateway import background_task
from headrace_gateway.webhooks.sender import Sender
from headrace_monitoring.gateway_metrics import GatewayMetrics


class LosingOutbox:
    """Loses a cancellation during a read of Redis."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def waiting(self, names: Iterable[str]) -> dict[str, tuple[int, float]]:
        assert not self.asked.is_set(), "it looks again after it was cancelled"
        self.asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return {}


async def never_called(*_: Any) -> Any:
    raise AssertionError


async def test_a_sender_ends_even_if_its_cancellation_was_lost() -> None:
    outbox: Any = LosingOutbox()
    sender = Sender(outbox, dict, never_called, GatewayMetrics(), poll_seconds=0.0)
    running = asyncio.create_task(sender.run())
    await outbox.asked.wait()
    running.cancel()
    async with asyncio.timeout(60):
        await asyncio.wait([running])


async def test_a_server_cancels_its_background_tasks_until_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_task, "_CANCEL_AGAIN_SECONDS", 0.01)
    lost = 0

    async def task() -> None:
        nonlocal lost
        while lost < 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                lost += 1

    async with background_task.running(task()):
        await asyncio.sleep(0)
    assert lost == 2
