"""Redis behind Sentinels: pools whose connections ask the Sentinels for the master, and retries during a failover."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import redis.asyncio.sentinel
import redis.sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

FAILOVER_SECONDS: Final = 30.0
"""How long a client that may repeat commands waits for the next master. Sentinels need some seconds to see that a
master is down, and some more to agree."""

# A client skips a Sentinel that does not answer. The timeouts are short, because every connect asks it again.
SENTINEL_TIMEOUTS: Final[dict[str, Any]] = {"socket_timeout": 1.0, "socket_connect_timeout": 1.0}
_RETRY_FOREVER: Final = -1


def master_pool(
    hosts: Sequence[tuple[str, int]], master: str, sentinel_options: Mapping[str, Any], **connection: Any
) -> "MasterPool":
    """Return a pool whose connections connect to the current master.

    Args:
        hosts: the Sentinels.
        sentinel_options: options of redis-py's client for the Sentinels.
        connection: options of redis-py's pools for the master.
    """
    options = {**SENTINEL_TIMEOUTS, **sentinel_options}
    sentinels = redis.sentinel.Sentinel(hosts, sentinel_kwargs=options)  # type: ignore[no-untyped-call]
    connection.setdefault("connection_class", MasterTlsConnection if connection.pop("ssl", False) else MasterConnection)
    return MasterPool(master, sentinels, **connection)  # type: ignore[no-untyped-call]


def async_master_pool(
    hosts: Sequence[tuple[str, int]], master: str, sentinel_options: Mapping[str, Any], **connection: Any
) -> "AsyncMasterPool":
    """Return the same pool for asyncio."""
    options = {**SENTINEL_TIMEOUTS, **sentinel_options}
    sentinels = redis.asyncio.sentinel.Sentinel(list(hosts), sentinel_kwargs=options)  # type: ignore[no-untyped-call]
    tls = connection.pop("ssl", False)
    connection["connection_class"] = AsyncMasterTlsConnection if tls else AsyncMasterConnection
    return AsyncMasterPool(master, sentinels, **connection)  # type: ignore[no-untyped-call]


class MasterConnection(redis.sentinel.SentinelManagedConnection):
    """Asks the Sentinels at every connect. redis-py's own class reconnects to the address of the dead master when a
    connection breaks during a command that is then repeated.
    """

    _has_address = False

    def connect_to(self, address: tuple[str, int]) -> None:
        self._has_address = True
        try:
            super().connect_to(address)  # type: ignore[no-untyped-call]
        finally:
            self._has_address = False

    def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        if self._has_address:
            super().connect_check_health(check_health, retry_socket_connect)
        else:
            self.connect()  # type: ignore[no-untyped-call]


class MasterTlsConnection(MasterConnection, redis.SSLConnection):
    """`MasterConnection` over TLS."""


class AsyncMasterConnection(redis.asyncio.sentinel.SentinelManagedConnection):
    """`MasterConnection` for asyncio."""

    _has_address = False

    async def connect_to(self, address: tuple[str, int]) -> None:
        self._has_address = True
        try:
            await super().connect_to(address)  # type: ignore[no-untyped-call]
        finally:
            self._has_address = False

    async def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        if self._has_address:
            await super().connect_check_health(check_health, retry_socket_connect)
        else:
            await self.connect()  # type: ignore[no-untyped-call]


class AsyncMasterTlsConnection(AsyncMasterConnection, redis.asyncio.SSLConnection):
    """`AsyncMasterConnection` over TLS."""


class MasterPool(redis.sentinel.SentinelConnectionPool):
    """redis-py's pool, which here also closes its connections to the Sentinels."""

    def disconnect(self, inuse_connections: bool = True) -> None:
        super().disconnect(inuse_connections)
        if inuse_connections:  # false when redis-py disconnects only idle connections, because the master has changed
            self.sentinel_manager.close()


class AsyncMasterPool(redis.asyncio.sentinel.SentinelConnectionPool):
    """`MasterPool` for asyncio."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:
            await asyncio.gather(*(sentinel.aclose() for sentinel in self.sentinel_manager.sentinels))


class _UntilFailover:
    """Retries for FAILOVER_SECONDS, with no limit on attempts, even if redis-py nests its retries.

    The next base class is redis-py's `Retry` for threads or for asyncio. mypy cannot see that, so types are ignored
    here.
    """

    def __init__(self) -> None:
        super().__init__(ExponentialBackoff(cap=0.5, base=0.05), _RETRY_FOREVER)  # type: ignore[call-arg]

    def call_with_retry(self, do: Any, fail: Any, is_retryable: Any = None, with_failure_count: bool = False) -> Any:
        deadline = time.monotonic() + FAILOVER_SECONDS

        def is_in_time(error: Exception) -> bool:
            return time.monotonic() < deadline and (is_retryable is None or is_retryable(error))

        return super().call_with_retry(do, fail, is_in_time, with_failure_count)  # type: ignore[misc]


class FailoverRetry(_UntilFailover, Retry):
    """For clients of threads."""


class AsyncFailoverRetry(_UntilFailover, AsyncRetry):
    """For clients of asyncio."""
