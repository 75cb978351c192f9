"""`RedisWatch`: checks once a second whether Redis answers, so that probes need not wait for it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from headrace_broker.connections import REDIS_ERRORS
from headrace_monitoring.gateway_metrics import GatewayMetrics

if TYPE_CHECKING:
    import redis.asyncio

_INTERVAL_SECONDS: Final = 1.0
_TIMEOUT_SECONDS: Final = 2.0
_STUCK_SECONDS: Final = 60.0
_RESTART_SECONDS: Final = 3.0

logger = logging.getLogger(__name__)


class RedisWatch:
    """Other threads may read its probes."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics: Final = metrics
        self._is_up: bool | None = None
        self._looked_at = time.monotonic()
        self._down_since: float | None = None

    def not_ready(self) -> str | None:
        """Why requests cannot be served; None if they can."""
        return None if self._is_up else "Redis does not answer"

    @property
    def is_down(self) -> bool:
        """Whether Redis has been silent for longer than a restart takes, which commands wait for."""
        return self._down_since is not None and time.monotonic() - self._down_since > _RESTART_SECONDS

    def not_alive(self) -> str | None:
        """Why the process should be restarted: its event loop is blocked. None if it should not be."""
        silent = time.monotonic() - self._looked_at
        return f"the event loop has been blocked for {silent:.0f} s" if silent > _STUCK_SECONDS else None

    @asynccontextmanager
    async def watching(self, client: "redis.asyncio.Redis") -> AsyncIterator[None]:
        """Check once, then periodically while the block runs."""
        await self._check(client)
        checking = asyncio.create_task(self._check_periodically(client))
        try:
            yield
        finally:
            checking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await checking

    async def _check_periodically(self, client: "redis.asyncio.Redis") -> None:
        while True:
            await asyncio.sleep(_INTERVAL_SECONDS)
            await self._check(client)

    async def _check(self, client: "redis.asyncio.Redis") -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                await client.ping()
        except (*REDIS_ERRORS, TimeoutError) as error:
            self._found(False, type(error).__name__)
        else:
            self._found(True, "")
        self._looked_at = time.monotonic()

    def _found(self, is_up: bool, why: str) -> None:
        if is_up != self._is_up:
            if is_up:
                logger.info("Redis connected")
            else:
                logger.warning("Redis unavailable: %s", why)
            self._down_since = None if is_up else time.monotonic()
        self._is_up = is_up
        self._metrics.redis_answers(up=is_up)
