"""`keep_running`: a role that an unforeseen error ends is started again, so that no replica goes on without it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from headrace_gateway.cancellation import check_cancelled
from headrace_monitoring.logging import frames

_AGAIN_SECONDS: Final = 10.0

logger = logging.getLogger(__name__)


async def keep_running(role: Callable[[], Awaitable[None]], *, again: float = _AGAIN_SECONDS) -> None:
    """Run a role until it returns or is cancelled; after an error, run it again in so many seconds."""
    while True:
        try:
            return await role()
        except Exception as error:  # noqa: BLE001  # whatever it is, the replica goes on
            check_cancelled()
            logger.error("role failed, and is started again: name=%s\n%s", role.__qualname__, frames(error))
        await asyncio.sleep(again)
