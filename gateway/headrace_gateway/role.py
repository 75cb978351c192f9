"""`keep_running`: restarts a background task after an unexpected error, so that no replica runs without it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from headrace_gateway.cancellation import check_cancelled
from headrace_monitoring.logging import frames

_AGAIN_SECONDS: Final = 10.0

logger = logging.getLogger(__name__)


async def keep_running(role: Callable[[], Awaitable[None]], *, again: float = _AGAIN_SECONDS) -> None:
    """Run a background task until it returns or is cancelled. After an error, restart it in `again` seconds."""
    while True:
        try:
            return await role()
        except Exception as error:  # noqa: BLE001  # whatever the error, the replica keeps running
            check_cancelled()
            logger.error("background task failed, restarting: name=%s\n%s", role.__qualname__, frames(error))
        await asyncio.sleep(again)
