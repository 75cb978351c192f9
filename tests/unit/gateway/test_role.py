"""Roles of a replica: one that fails says so and is started again."""

import asyncio

import pytest

from headrace_gateway.role import keep_running


async def test_a_role_that_fails_is_logged_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    starts = []

    async def role() -> None:
        starts.append(1)
        if len(starts) < 3:
            raise ValueError("a " + "secret")

    await keep_running(role, again=0)
    assert len(starts) == 3
    assert caplog.text.count("role failed") == 2
    assert "ValueError" in caplog.text
    assert "a secret" not in caplog.text


async def test_a_role_that_is_cancelled_is_not_started_again() -> None:
    started = asyncio.Event()

    async def role() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise OSError from None  # as redis-py does where it connects

    running = asyncio.create_task(keep_running(role, again=0))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
