"""Redis clients with the timeouts that the queue needs. kombu's own connections are not made here."""

from typing import Any, Final

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

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
    "socket_keepalive": True,
}


def connect(url: str, *, retries: int = 0) -> "redis.Redis":
    """A client whose replies are bytes; safe to share between threads.

    A writer wants no retries: only it knows whether repeating a command is harmless.
    """
    return redis.Redis.from_url(url, retry=Retry(_backoff(), retries), **_OPTIONS)


def connect_async(url: str, *, retries: int = 0) -> "redis.asyncio.Redis":
    """The same for asyncio; it belongs to one event loop."""
    return redis.asyncio.Redis.from_url(url, retry=AsyncRetry(_backoff(), retries), **_OPTIONS)


def _backoff() -> ExponentialBackoff:
    return ExponentialBackoff(cap=1.0, base=0.05)
