"""The limits of API keys: requests and tokens per minute, bytes kept in Redis, and bytes of bodies in this process."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Final

import structlog

from headrace_broker.keys import stream_key
from headrace_broker.server.asking_homes import unless_away_async
from headrace_broker.server.connections import REDIS_ERRORS
from headrace_broker.server.shards import id_in_keys
from headrace_broker.server.stream_servers import AsyncStreamServers
from headrace_gateway.errors import ApiError
from headrace_gateway.keys.api_key import ApiKey
from headrace_gateway.redis.keys import CHARGED_SECONDS, charged_key, rate_key, script, stored_bytes_key, stored_key
from headrace_wire.codes import GatewayCode

if TYPE_CHECKING:
    import redis.asyncio

_CHARGING_SECONDS: Final = 5.0
"""Seconds that a stopping gateway waits until its open answers are charged."""
_ADMIT: Final = script("rate_prelude", "rate_admit")
_CHARGE: Final = script("rate_prelude", "rate_charge")

LEAST_BYTES: Final = 4096
"""Smaller requests are not counted, because an entry takes memory too. `requests_per_minute` bounds them."""
LEAST_STREAM_BYTES: Final = 64 * 2**10
"""Smaller streams are not counted. `requests_per_minute` bounds them."""
LEAST_STREAM_TOKENS: Final = 100
"""The streams of an answer with fewer output tokens are never large."""
_COUNT: Final = script("stored_count")

BODIES_AT_ONCE: Final = 16
"""Bodies of the largest size that one key may have in memory at a time."""
Take = Callable[[int], None]
"""Reserves a number of bytes for a body. Raises ApiError 429 if the key has no room for them."""

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)


class RateLimits:
    """Requests and tokens per minute of each API key, shared by all replicas through Redis.

    Each limit is a token bucket with a capacity of one minute. An admitted request takes one from the bucket of
    requests for each of its choices. Its tokens are charged to the bucket of tokens after they were read, so that
    bucket may fall below zero. Then it admits nothing until it has refilled. An answer is charged once, however often
    and wherever it is read. Keys without limits need no call to Redis.
    """

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._admit: Final = client.register_script(_ADMIT.text)
        self._charge: Final = client.register_script(_CHARGE.text)
        self._open: Final[set[Callable[[], asyncio.Task[None]]]] = set()
        """For each answer that is being read, the function that starts to charge it."""
        self._charging: Final[set[asyncio.Task[None]]] = set()

    async def admit(self, key: ApiKey, count: int = 1, *, taken: int = 0) -> dict[str, str]:
        """Take `count` requests from the bucket. Return the headers that report how much is left.

        Args:
            taken: number that the same HTTP request has taken already. A retry takes them again, so Retry-After
                includes the time in which they refill.

        Raises ApiError 429 if a limit is reached, and redis-py's errors.
        """
        requests, tokens = key.requests_per_minute, key.tokens_per_minute
        if requests is None and tokens is None:
            return {}
        admitted, requests_left, tokens_left, wait = await self._admit(
            keys=_ADMIT.keys(rate=rate_key(key.name)), args=[requests or 0, tokens or 0, count]
        )
        left = {"requests": float(requests_left), "tokens": float(tokens_left)}
        headers = _headers({"requests": requests, "tokens": tokens}, left)
        if not admitted:
            again = 60 * taken / requests if requests else 0.0
            raise _refused(key, left, float(wait) + again, headers, count)
        return headers

    async def admit_choices(self, key: ApiKey, count: int, headers: dict[str, str]) -> dict[str, str]:
        """Take one more from the bucket of requests for each choice of an admitted request after the first.

        Args:
            count: choices of all prompts of the request.
            headers: the result of `admit`; returned if nothing more is taken.
        """
        bound = key.requests_per_minute
        if bound is None or count <= 1:
            return headers
        if count > bound:
            message = f"the request has {count} choices, more than the {bound} requests a minute of the key {key.name}"
            raise ApiError(429, "rate_limit_error", GatewayCode.RATE_LIMIT_EXCEEDED, message, headers=headers)
        return await self.admit(key, count - 1, taken=1)

    async def charge(self, key: str, tokens_per_minute: int | None, answer_id: str, tokens: int) -> None:
        """Charge the prompt and output tokens of an answer that are known so far. Raises redis-py's errors.

        Repeated calls, also by several readers, charge only the increase.
        """
        if tokens_per_minute is not None and tokens > 0:
            keys = _CHARGE.keys(rate=rate_key(key), charged=charged_key(answer_id))
            await self._charge(keys=keys, args=[tokens_per_minute, tokens, CHARGED_SECONDS])

    @asynccontextmanager
    async def charging(self, key: ApiKey, answer_id: str, count: Callable[[], int]) -> AsyncIterator[None]:
        """Charge the tokens that `count` returns at the end of the block, even if the task is cancelled.

        If `aclose` is called before, it charges them. Nothing is charged while Redis is unavailable.
        """

        def start() -> "asyncio.Task[None]":
            task = asyncio.create_task(self._try_charge(key, answer_id, count()))
            self._charging.add(task)
            task.add_done_callback(self._charging.discard)
            return task

        self._open.add(start)
        try:
            yield
        finally:
            self._open.discard(start)
            await asyncio.shield(start())

    async def aclose(self) -> None:
        """Charge the answers that are still read."""
        for start in self._open:
            start()
        if self._charging:
            await asyncio.wait(self._charging, timeout=_CHARGING_SECONDS)

    async def _try_charge(self, key: ApiKey, answer_id: str, tokens: int) -> None:
        try:
            await self.charge(key.name, key.tokens_per_minute, answer_id, tokens)
        except REDIS_ERRORS as error:
            logger.warning("tokens not charged", answer_id=answer_id, tokens=tokens, reason=type(error).__name__)


def _refused(key: ApiKey, left: dict[str, float], wait: float, headers: dict[str, str], count: int) -> ApiError:
    is_requests = key.requests_per_minute is not None and left["requests"] < count
    what, bound = ("requests", key.requests_per_minute) if is_requests else ("tokens", key.tokens_per_minute)
    seconds = max(1, math.ceil(wait))
    used = "used" if count == 1 or not is_requests else f"fewer than {count} left of"
    message = f"the key {key.name} has {used} its {bound} {what} of this minute; try again in {seconds} s"
    headers = {**headers, "retry-after": str(seconds)}
    return ApiError(429, "rate_limit_error", GatewayCode.RATE_LIMIT_EXCEEDED, message, headers=headers)


def _headers(bounds: dict[str, int | None], left: dict[str, float]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for what, bound in bounds.items():
        if bound is not None:
            headers[f"x-ratelimit-limit-{what}"] = str(bound)
            headers[f"x-ratelimit-remaining-{what}"] = str(max(0, math.floor(left[what])))
            headers[f"x-ratelimit-reset-{what}"] = duration((bound - left[what]) * 60 / bound)
    return headers


def duration(seconds: float) -> str:
    """Format a duration as in OpenAI's headers: `12ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(max(0.0, seconds) * 1000)}ms"
    if seconds < 60:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"


class StoredBytes:
    """Counts the bytes that requests keep in Redis, and limits them for each tenant, or key without a tenant.

    Only large requests count: the message in the queue until the answer has ended, the envelope, and the stored input
    and output of a response. The streams of a large answer are counted after its end. An entry expires with the data
    that it counts, so no entry remains after a replica is killed.

    Methods raise redis-py's errors.

    Args:
        client: from the broker's `connections.connect_async`.
        bound: bytes that one tenant may keep, lowered to a quarter of Redis's `maxmemory` if that is less.
        streams: the servers that have the streams; without them, `client`.
    """

    def __init__(self, client: "redis.asyncio.Redis", bound: int, streams: AsyncStreamServers | None = None) -> None:
        self._bound: Final = bound
        self._streams: Final = AsyncStreamServers(client, {}, 0) if streams is None else streams
        self._count: Final = client.register_script(_COUNT.text)

    async def admit(self, key: str, tenant: str | None, item: str, num_bytes: int, life: int) -> int:
        """Count a request, and return the bytes that are counted. Raises ApiError 429 if its tenant has no room.

        Args:
            life: seconds after which the entry expires.
        """
        if num_bytes < LEAST_BYTES:
            return 0
        found = await self._run(key, tenant, item, num_bytes, life, self._bound)
        if found is None:
            return num_bytes
        used, bound = found
        owner = f"the key {key}" if tenant is None else f"the tenant {tenant}"
        message = (
            f"{owner} has {used} bytes in Redis and may have at most {bound}, so {num_bytes} more cannot be stored: "
            "wait for answers, delete responses, or send store: false"
        )
        headers = {"retry-after": "10"}
        raise ApiError(429, "rate_limit_error", GatewayCode.STORED_BYTES_EXCEEDED, message, headers=headers)

    async def change(self, key: str, tenant: str | None, item: str, num_bytes: int, life: int) -> None:
        """Replace the count of an admitted request by `num_bytes`, which Redis keeps for `life` seconds."""
        await self._run(key, tenant, item, num_bytes if num_bytes >= LEAST_BYTES else 0, life, 0)

    async def count_streams(self, key: str, tenant: str | None, request_ids: Sequence[str], life: int) -> None:
        """Count the streams of an answer, if they are large.

        Args:
            life: seconds from now for which the queue keeps the streams.
        """
        sizes: list[object] = []
        for home, there in (await self._streams.by_home(request_ids)).items():
            async with unless_away_async(home), (await self._streams.of(home)).pipeline(transaction=False) as pipe:
                for request_id in there:
                    pipe.memory_usage(stream_key(id_in_keys(home, request_id)))
                sizes += await pipe.execute(raise_on_error=False)  # older users.acl files forbid it
        num_bytes = sum(size for size in sizes if isinstance(size, int))
        if num_bytes >= LEAST_STREAM_BYTES:
            await self._run(key, tenant, f"{request_ids[0]}:stream", num_bytes, life, 0)

    async def _run(
        self, key: str, tenant: str | None, item: str, num_bytes: int, life: int, bound: int
    ) -> tuple[int, int] | None:
        owner = f"key:{key}" if tenant is None else f"tenant:{tenant}"
        keys = _COUNT.keys(stored=stored_key(owner), stored_bytes=stored_bytes_key(owner))
        found: tuple[int, int] | None = await self._count(keys=keys, args=[item, num_bytes, life, bound])
        return found


class BodyBytes:
    """Limits the bytes of one key's bodies in memory, from their arrival until they are checked.

    Args:
        bound: bytes of one key.
    """

    def __init__(self, bound: int) -> None:
        self._bound: Final = bound
        self._taken: Final[Counter[str]] = Counter()

    @contextmanager
    def room(self, key: str) -> Iterator[Take]:
        """Yield the function that reserves bytes for one body. They are freed at the end of the block."""
        taken = 0

        def take(num_bytes: int) -> None:
            nonlocal taken
            if self._taken[key] + num_bytes > self._bound:
                raise self._full(key, num_bytes)
            self._taken[key] += num_bytes
            taken += num_bytes

        try:
            yield take
        finally:
            self._taken[key] -= taken
            if not self._taken[key]:
                del self._taken[key]

    def _full(self, key: str, num_bytes: int) -> ApiError:
        message = (
            f"the key {key} sends {self._taken[key]} bytes of bodies and may send at most {self._bound} at a time, "
            f"so {num_bytes} more are not read: send fewer large requests at once"
        )
        headers = {"retry-after": "1"}
        return ApiError(429, "rate_limit_error", GatewayCode.BODY_BYTES_EXCEEDED, message, headers=headers)
