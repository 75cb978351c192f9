"""Background tasks: a loop that polls Redis for work, restarts after errors, and cancellation."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

import structlog

from headrace_broker.server.connections import REDIS_ERRORS
from headrace_monitoring.logging import frames

_RESTART_SECONDS: Final = 10.0
_CANCEL_AGAIN_SECONDS: Final = 0.1

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)


async def keep_running(task: Callable[[], Awaitable[None]], *, restart_after: float = _RESTART_SECONDS) -> None:
    """Run a background task until it returns or is cancelled. Restart it `restart_after` seconds after an error."""
    while True:
        try:
            return await task()
        except Exception as error:  # noqa: BLE001  # whatever the error, the replica keeps running
            check_cancelled()
            logger.error("background task failed, restarting", name=task.__qualname__, exception=frames(error))
        await asyncio.sleep(restart_after)


async def poll(step: Callable[[], Awaitable[bool]], name: str, *, seconds: float = 1.0) -> None:
    """Call `step` until this task is cancelled: again at once if it returns True, else after `seconds`.

    While Redis is unavailable, the loop continues. It logs the first failure only.
    """
    is_redis_up = True
    while True:
        has_more = False
        try:
            has_more = await step()
            is_redis_up = True
        except REDIS_ERRORS as error:
            if is_redis_up:
                logger.warning("background task waiting for Redis", name=name, reason=type(error).__name__)
            is_redis_up = False
        check_cancelled()  # asyncio.wait_for of Python 3.11, in redis-py, can lose a cancellation
        if not has_more:
            await asyncio.sleep(seconds)


@asynccontextmanager
async def running(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run the background tasks while the block runs."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield
    finally:
        await end_tasks(*tasks)


def check_cancelled() -> None:
    """Raise CancelledError if this task was cancelled.

    redis-py may raise an error of its own instead, for example if it is cancelled while it connects.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def end_tasks(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks until they are done. Python 3.11 can lose a cancellation that coincides with a reply of Redis."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=_CANCEL_AGAIN_SECONDS)
    await asyncio.gather(*tasks, return_exceptions=True)
