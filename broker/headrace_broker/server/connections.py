"""Redis clients with the timeouts that the queue needs. kombu makes its own connections elsewhere."""

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import hiredis
import redis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from headrace_broker.server.cluster import (
    AsyncSlotConnection,
    AsyncTlsSlotConnection,
    ClusterNodes,
    SlotConnection,
    TlsSlotConnection,
    address_of_slot,
    async_redirect_retry,
    redirect_retry,
    slot_options,
)
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


def connect(url: str, *, retries: int = 0, timeout: float = 2 * BLOCK_SECONDS) -> "redis.Redis":
    """Return a client whose replies are bytes. Threads may share it. `timeout`: seconds to wait for a reply, and 5 at
    most for a connection.

    `retries` is how often a failed command is repeated. It is 0 for a client that writes, because only the caller knows
    whether a write may be repeated. Behind Sentinels, any other number means retrying for FAILOVER_SECONDS. Raises
    SettingsError for an invalid URL.
    """
    server = ServerUrl.parse(url)
    options = {**_options(server), "socket_timeout": timeout}
    options["socket_connect_timeout"] = min(timeout, options["socket_connect_timeout"])
    if server.kind == "sentinel":
        retry = FailoverRetry() if retries else Retry(_backoff(), 0)
        return redis.Redis.from_pool(master_pool(*_master(server), retry=retry, **options))
    return redis.Redis.from_url(server.text, retry=Retry(_backoff(), retries), **options)


def connect_cluster(
    url: str, keys: Iterable[str], *, retries: int = 0, timeout: float = 2 * BLOCK_SECONDS
) -> "list[redis.Redis]":
    """Return for each key a client of the node that has the key's slot, in the Redis Cluster of this URL.

    A command that the node redirects is repeated once. The other arguments and the errors are those of `connect`; with
    `retries`, a failed command is repeated for FAILOVER_SECONDS.
    """
    server = ServerUrl.parse(url, may_be_cluster=True)
    nodes = ClusterNodes(server.hosts)
    options = {**_options(server), "socket_timeout": timeout}
    options["socket_connect_timeout"] = min(timeout, options["socket_connect_timeout"])
    options["connection_class"] = TlsSlotConnection if options.pop("ssl", False) else SlotConnection
    options["retry"] = FailoverRetry() if retries else redirect_retry()
    return [redis.Redis.from_pool(redis.ConnectionPool(**slot_options(nodes, key, **options))) for key in keys]


def connect_cluster_async(url: str, keys: Iterable[str], *, retries: int = 0) -> "list[redis.asyncio.Redis]":
    """Return the same clients for asyncio. They belong to one event loop."""
    server = ServerUrl.parse(url, may_be_cluster=True)
    nodes = ClusterNodes(server.hosts)
    options = _options(server)
    options["connection_class"] = AsyncTlsSlotConnection if options.pop("ssl", False) else AsyncSlotConnection
    options["retry"] = AsyncFailoverRetry() if retries else async_redirect_retry()
    return [_async_client(redis.asyncio.ConnectionPool(**slot_options(nodes, key, **options))) for key in keys]


def address_of(client: "redis.Redis | redis.asyncio.Redis") -> str:
    """Return the client's server for messages: host:port, the path of its socket, or master@host:port of a Sentinel.

    Of several Sentinels it is the first in the order of the alphabet: redis-py changes their order. Of a client of a
    Redis Cluster it is the node that has its slot, once it was connected.
    """
    pool: Any = client.connection_pool
    options = pool.connection_kwargs
    if (address := address_of_slot(options)) is not None:
        return address
    if "host" in options:
        return f"{options['host']}:{options['port']}"
    sentinels = getattr(pool, "sentinel_manager", None)
    if sentinels is not None:
        return f"{pool.service_name}@{min(map(address_of, sentinels.sentinels))}"
    return str(options.get("path") or "?")


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
    return _async_client(pool)


def _async_client(pool: "redis.asyncio.ConnectionPool") -> "redis.asyncio.Redis":
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
    return {**_OPTIONS, **keepalive, **(server.connection_options if server.kind in ("sentinel", "cluster") else {})}


def _backoff() -> ExponentialBackoff:
    return ExponentialBackoff(cap=1.0, base=0.05)
