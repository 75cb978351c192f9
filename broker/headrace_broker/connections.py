"""Redis clients with the timeouts that the queue needs. kombu's own connections are not made here."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import hiredis
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from headrace_broker.sentinel import AsyncFailoverRetry, FailoverRetry, async_master_pool, master_pool
from headrace_broker.server_url import ServerUrl

BLOCK_SECONDS: Final = 5.0
"""The longest single blocking read; it stays well under the socket timeout, so that only dead connections time out."""

CONNECTION_ERRORS: Final = (redis.ConnectionError, redis.TimeoutError, OSError)
"""The server could not be reached or its reply was lost: whether the command ran is unknown."""

REDIS_ERRORS: Final = (redis.RedisError, OSError)
"""The server could not be reached, or refused: out of memory, read-only, not permitted. Both may pass."""

_OPTIONS: Final[dict[str, Any]] = {
    "protocol": 2,  # the shape of replies is then the same in every redis-py version and inside Lua
    "socket_connect_timeout": 5.0,
    "socket_timeout": 2 * BLOCK_SECONDS,
    "driver_info": redis.DriverInfo(),  # one for all: each connection would look for redis-py's version on the disk
}


def connect(url: str, *, retries: int = 0) -> "redis.Redis":
    """A client whose replies are bytes; safe to share between threads.

    A writer wants no retries: only it knows whether repeating a command is harmless. Behind Sentinels, any number of
    retries means trying for as long as a failover may take. Raises SettingsError for a URL that cannot be understood.
    """
    server = ServerUrl.parse(url)
    if server.kind == "sentinel":
        retry = FailoverRetry() if retries else Retry(_backoff(), 0)
        return redis.Redis.from_pool(master_pool(*_master(server), retry=retry, **_options(server)))
    return redis.Redis.from_url(server.text, retry=Retry(_backoff(), retries), **_options(server))


def connect_async(url: str, *, retries: int = 0) -> "redis.asyncio.Redis":
    """The same for asyncio; it belongs to one event loop."""
    server = ServerUrl.parse(url)
    pool: redis.asyncio.ConnectionPool
    if server.kind == "sentinel":
        retry = AsyncFailoverRetry() if retries else AsyncRetry(_backoff(), 0)
        pool = async_master_pool(*_master(server), retry=retry, **_options(server))
    else:
        retry = AsyncRetry(_backoff(), retries)
        pool = redis.asyncio.ConnectionPool.from_url(server.text, retry=retry, **_options(server))
    pool.connection_class = _packed_by_hiredis(pool.connection_class)
    return redis.asyncio.Redis.from_pool(pool)


class _HiredisPacking:
    """redis-py leaves packing to hiredis in threads only. An XREAD of many streams takes Python ten times as long."""

    def pack_command(self, name: str | bytes, *args: str | bytes | float) -> list[bytes]:
        return [hiredis.pack_command((*name.split(), *args))]  # a name may be two words


def _packed_by_hiredis(kind: type[Any]) -> type[Any]:
    return type(kind.__name__, (_HiredisPacking, kind), {})


def _master(server: ServerUrl) -> tuple[Sequence[tuple[str, int]], str, Mapping[str, Any]]:
    return server.hosts, server.master, server.sentinel_options


def _options(server: ServerUrl) -> dict[str, Any]:
    keepalive = {} if server.kind == "unix" else {"socket_keepalive": True}
    return {**_OPTIONS, **keepalive, **(server.connection_options if server.kind == "sentinel" else {})}


def _backoff() -> ExponentialBackoff:
    return ExponentialBackoff(cap=1.0, base=0.05)
