"""The background tasks of a replica: a failed one is logged and restarted."""

import asyncio

import pytest

from headrace_gateway.background_task import keep_running


async def test_a_failed_background_task_is_logged_and_restarted(caplog: pytest.LogCaptureFixture) -> None:
    starts = []

    async def task() -> None:
        starts.append(1)
        if len(starts) < 3:
            raise ValueError("a " + "secret")

    await keep_running(task, restart_after=0)
    assert len(starts) == 3
    assert caplog.text.count("background task failed") == 2
    assert "ValueError" in caplog.text
    assert "a secret" not in caplog.text


async def test_a_cancelled_background_task_is_not_restarted() -> None:
    started = asyncio.Event()

    async def task() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise OSError from None  # as redis-py does where it connects

    running = asyncio.create_task(keep_running(task, restart_after=0))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
