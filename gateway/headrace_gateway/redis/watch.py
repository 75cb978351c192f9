"""`RedisWatch`: checks whether Redis answers, has memory and knows a model, so that probes need not wait for it."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import redis.asyncio
import structlog

from headrace_broker.keys import MODELS_KEY
from headrace_broker.server.connections import REDIS_ERRORS
from headrace_broker.server.restart_safety import restart_safety_async
from headrace_gateway.background_task import end_tasks
from headrace_monitoring.gateway_metrics import GatewayMetrics

_INTERVAL_SECONDS: Final = 1.0
_SOON_SECONDS: Final = 0.2
"""Seconds between two checks while no model is registered, so that the first worker is noticed soon."""
_TIMEOUT_SECONDS: Final = 2.0
_STUCK_SECONDS: Final = 60.0
_RESTART_SECONDS: Final = 3.0
FULL: Final = 0.95
"""The share of `maxmemory` above which a replica is not ready: Redis will soon refuse writes."""

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)


class RedisWatch:
    """Checks Redis periodically. Other threads may call its probes."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics: Final = metrics
        self._is_up: bool | None = None
        self._refusal = ""
        """The error with which Redis refused the last check; empty if it did not. It names no address."""
        self._has_models = False
        self._shortage: str | None = None
        self._looked_at = time.monotonic()
        self._down_since: float | None = None

    def not_ready(self) -> str | None:
        """Return why requests cannot be served; None if they can."""
        if not self._is_up:
            return f"Redis refuses the gateway: {self._refusal}" if self._refusal else "Redis does not answer"
        if self._shortage is not None:
            return self._shortage
        return None if self._has_models else "no worker has registered a model"

    @property
    def is_down(self) -> bool:
        """Whether Redis has been silent for longer than a restart takes. Commands wait only for a restart."""
        return self._down_since is not None and time.monotonic() - self._down_since > _RESTART_SECONDS

    def not_alive(self) -> str | None:
        """Return why the process should be restarted: its event loop is blocked. None if it is not."""
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
            await end_tasks(checking)

    async def _check_periodically(self, client: "redis.asyncio.Redis") -> None:
        while True:
            await asyncio.sleep(_INTERVAL_SECONDS if self._has_models else _SOON_SECONDS)
            await self._check(client)

    async def _check(self, client: "redis.asyncio.Redis") -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                self._shortage = _shortage(await client.info("memory"))
                self._has_models = bool(await client.exists(MODELS_KEY))
                if not self._is_up:  # at each connection, as a failover may lead to another server
                    for warning in (await restart_safety_async(client)).warnings:
                        logger.warning("Redis may lose messages", reason=warning)
        except (*REDIS_ERRORS, TimeoutError) as error:
            refused = isinstance(error, redis.AuthenticationError | redis.ResponseError)
            self._refusal = str(error) if refused else ""
            self._found(False, type(error).__name__)
        else:
            self._found(True, "")
        self._looked_at = time.monotonic()

    def _found(self, is_up: bool, why: str) -> None:
        if is_up != self._is_up:
            if is_up:
                logger.info("Redis connected")
            else:
                logger.warning("Redis unavailable", reason=why)
            self._down_since = None if is_up else time.monotonic()
        self._is_up = is_up
        self._metrics.redis_answers(up=is_up)


def _shortage(memory: Mapping[str, Any]) -> str | None:
    """Return why Redis will soon refuse writes; None if it has memory, or evicts keys to get some."""
    used, most = memory["used_memory"], memory.get("maxmemory", 0)
    if not most or memory.get("maxmemory_policy") != "noeviction" or used < FULL * most:
        return None
    return f"Redis is almost full: {used} of {most} bytes are used"
