"""`RateLimits`: requests and tokens a minute of each API key, shared by all replicas through Redis.

Both are token buckets with a capacity of one minute. An admitted request takes one from the first bucket. Its tokens
are charged to the second one after they were read, so that bucket may go below zero, and then admits nothing until it
has refilled. An answer is charged once, however often and wherever it is read.
"""

import logging
import math
from typing import TYPE_CHECKING, Final

from headrace_broker.connections import REDIS_ERRORS
from headrace_gateway.broker_errors import unavailable
from headrace_gateway.errors import ApiError
from headrace_gateway.keys import ApiKey
from headrace_gateway.redis_keys import CHARGED_SECONDS, charged_key, rate_key
from headrace_gateway.scripts import script

if TYPE_CHECKING:
    import redis.asyncio

_ADMIT: Final = script("rate_prelude", "rate_admit")
_CHARGE: Final = script("rate_prelude", "rate_charge")

logger = logging.getLogger(__name__)


class RateLimits:
    """Keys without limits need no call to Redis."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._admit: Final = client.register_script(_ADMIT.text)
        self._charge: Final = client.register_script(_CHARGE.text)

    async def admit(self, key: ApiKey) -> dict[str, str]:
        """Take one request from the bucket, and return the headers that report what is left.

        Raises ApiError 429 if a limit is reached, 503 if Redis is unavailable.
        """
        requests, tokens = key.requests_per_minute, key.tokens_per_minute
        if requests is None and tokens is None:
            return {}
        try:
            admitted, requests_left, tokens_left, wait = await self._admit(
                keys=_ADMIT.keys(rate=rate_key(key.name)), args=[requests or 0, tokens or 0]
            )
        except REDIS_ERRORS as error:
            raise unavailable() from error
        left = {"requests": float(requests_left), "tokens": float(tokens_left)}
        headers = _headers({"requests": requests, "tokens": tokens}, left)
        if not admitted:
            raise _refused(key, left, float(wait), headers)
        return headers

    async def charge(self, key: ApiKey, answer_id: str, tokens: int) -> None:
        """Charge the prompt and output tokens of an answer that are known so far.

        Repeated calls, also by several readers, charge only the increase. Nothing is charged while Redis is away.
        """
        if key.tokens_per_minute is None or tokens <= 0:
            return
        keys = _CHARGE.keys(rate=rate_key(key.name), charged=charged_key(answer_id))
        try:
            await self._charge(keys=keys, args=[key.tokens_per_minute, tokens, CHARGED_SECONDS])
        except REDIS_ERRORS as error:
            logger.warning("tokens not charged: answer_id=%s tokens=%d (%s)", answer_id, tokens, type(error).__name__)


def _refused(key: ApiKey, left: dict[str, float], wait: float, headers: dict[str, str]) -> ApiError:
    is_requests = key.requests_per_minute is not None and left["requests"] < 1
    what, bound = ("requests", key.requests_per_minute) if is_requests else ("tokens", key.tokens_per_minute)
    seconds = max(1, math.ceil(wait))
    message = f"the key {key.name} has used its {bound} {what} of this minute; try again in {seconds} s"
    headers = {**headers, "retry-after": str(seconds)}
    return ApiError(429, "rate_limit_error", "rate_limit_exceeded", message, headers=headers)


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
