"""Redis clients with the timeouts that the queue needs. kombu makes its own connections elsewhere."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import hiredis
import redis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from headrace_broker.server.sentinel import AsyncFailoverRetry, FailoverRetry, async_master_pool, master_pool
from headrace_broker.server.url import ServerUrl

BLOCK_SECONDS: Final = 5.0
"""The longest blocking read. It is well below the socket timeout, so that only dead connections time out."""

CONNECTION_ERRORS: Final = (redis.ConnectionError, redis.TimeoutError, OSError)
"""The server could not be reached, or its reply was lost: the command may or may not have run."""

REDIS_ERRORS: Final = (redis.RedisError, OSError)
"""The server could not be reached, or refused: out of memory, read-only, not permitted. Both may be temporary."""

_OF_ALL_KEYS: Final = re.compile(r"(?!WRONGTYPE )[A-Z]{3,} |ACL failure|[Uu]nknown (Redis )?command")
"""Matches errors with a code other than WRONGTYPE, and errors of that kind that have no code inside a script."""

_OPTIONS: Final[dict[str, Any]] = {
    "protocol": 2,  # its replies have the same shape in every redis-py version and in Lua
    "max_connections": 10_000,  # a call that waits for a stream holds one, and redis-py refuses the 101st
    "socket_connect_timeout": 5.0,
    "socket_timeout": 2 * BLOCK_SECONDS,
    "driver_info": redis.DriverInfo(),  # shared: else each connection reads redis-py's version from the disk
}


def is_fault_of_server(error: BaseException) -> bool:
    """Return whether a command on any other key would fail in the same way, so that no message is at fault.

    That is so if Redis is away, out of memory, read-only or loading, if its user lacks a right, or if it does not know
    the command. The errors of a single key are WRONGTYPE, and errors about its content, which have no code.
    """
    return not isinstance(error, redis.ResponseError) or (
        type(error) is not redis.ResponseError or _OF_ALL_KEYS.match(str(error)) is not None
    )


def connect(url: str, *, retries: int = 0) -> "redis.Redis":
    """Return a client whose replies are bytes. Threads may share it.

    `retries` is how often a failed command is repeated. It is 0 for a client that writes, because only the caller knows
    whether a write may be repeated. Behind Sentinels, any other number means retrying for FAILOVER_SECONDS. Raises
    SettingsError for an invalid URL.
    """
    server = ServerUrl.parse(url)
    if server.kind == "sentinel":
        retry = FailoverRetry() if retries else Retry(_backoff(), 0)
        return redis.Redis.from_pool(master_pool(*_master(server), retry=retry, **_options(server)))
    return redis.Redis.from_url(server.text, retry=Retry(_backoff(), retries), **_options(server))


def connect_async(url: str, *, retries: int = 0) -> "redis.asyncio.Redis":
    """Return the same client for asyncio. It belongs to one event loop."""
    server = ServerUrl.parse(url)
    pool: redis.asyncio.ConnectionPool
    if server.kind == "sentinel":
        retry = AsyncFailoverRetry() if retries else AsyncRetry(_backoff(), 0)
        pool = async_master_pool(*_master(server), retry=retry, **_options(server))
    else:
        retry = AsyncRetry(_backoff(), retries)
        pool = redis.asyncio.ConnectionPool.from_url(server.text, retry=retry, **_options(server))
    kind: Any = pool.connection_class
    pool.connection_class = type(kind.__name__, (_AsyncConnection, kind), {})
    return redis.asyncio.Redis.from_pool(pool)


class _AsyncConnection(AbstractConnection):
    """What differs from redis-py's connections for asyncio."""

    def pack_command(self, name: str | bytes, *args: str | bytes | float) -> list[bytes]:  # type: ignore[override]
        """Pack a command with hiredis, as redis-py does for threads. An XREAD of many streams is ten times as fast."""
        return [hiredis.pack_command((*name.split(), *args))]  # a command's name may have two words

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Send a command. If the task is cancelled meanwhile, close the connection and raise CancelledError.

        redis-py waits by `asyncio.wait_for`. Before Python 3.12 that returns normally if the task is cancelled when the
        command has just been sent, and the cancelled task would wait for the reply: forever, in a subscriber.
        """
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        try:
            await super().send_packed_command(command, check_health)
        finally:  # also after an error, which the caller might answer with a retry
            if task is not None and task.cancelling() > before:
                await self.disconnect(nowait=True)  # nobody will read the reply
                raise asyncio.CancelledError


def _master(server: ServerUrl) -> tuple[Sequence[tuple[str, int]], str, Mapping[str, Any]]:
    return server.hosts, server.master, server.sentinel_options


def _options(server: ServerUrl) -> dict[str, Any]:
    keepalive = {} if server.kind == "unix" else {"socket_keepalive": True}
    return {**_OPTIONS, **keepalive, **(server.connection_options if server.kind == "sentinel" else {})}


def _backoff() -> ExponentialBackoff:
    return ExponentialBackoff(cap=1.0, base=0.05)
