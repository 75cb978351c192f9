"""`keep_running`: restarts a background task after an unexpected error, so that no replica runs without it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from headrace_gateway.cancellation import check_cancelled
from headrace_monitoring.logging import frames

_RESTART_SECONDS: Final = 10.0

logger = logging.getLogger(__name__)


async def keep_running(task: Callable[[], Awaitable[None]], *, restart_after: float = _RESTART_SECONDS) -> None:
    """Run a background task until it returns or is cancelled. Restart it that many seconds after an error."""
    while True:
        try:
            return await task()
        except Exception as error:  # noqa: BLE001  # whatever the error, the replica keeps running
            check_cancelled()
            logger.error("background task failed, restarting: name=%s\n%s", task.__qualname__, frames(error))
        await asyncio.sleep(restart_after)
