"""`Outbox`: deliveries in Redis. Each endpoint has Claims of its own, so a slow endpoint does not delay the others.

A replica records the outcome of an attempt before it releases the claim. If it dies between the two, the next replica
continues from the record. A replica that has lost its claim may still record its outcome: that loses no delivery.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from headrace_gateway.redis.claims import Claim, Claims
from headrace_gateway.redis.keys import delivery_key, script, undelivered_key
from headrace_gateway.webhooks.event import Event

if TYPE_CHECKING:
    import redis.asyncio

_PUT: Final = script("claims_prelude", "webhooks_put")
LEASE_SECONDS: Final = 45.0
"""Seconds after which the claim of a dead replica expires. An attempt takes less."""
_REMEMBERED_SECONDS: Final = 3600
"""Seconds for which a delivered event is recognised if it is published again."""


SCHEDULE: Final = (0.0, 5.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0, 72000.0, 86400.0)
"""Seconds before each attempt, counted from the attempt before."""
JITTER: Final = 0.2
"""A delay grows by up to this fraction, so that attempts that failed together are not repeated together."""
LIFE_SECONDS: Final = 4 * 86400
"""Seconds after which an event expires. The schedule with the most jitter is shorter; the rest is for Retry-After."""
_LONGEST_WAIT: Final = 86400.0


class Delivery(msgspec.Struct, frozen=True):
    """An event for one endpoint."""

    event: Event
    failed: int = 0
    """Failed attempts so far."""
    is_done: bool = False
    """Delivered or given up."""


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Delivery)


class Outbox:
    """Stores deliveries. Methods raise redis-py's errors. `name` is the name of an endpoint.

    Args:
        client: from the broker's `connections.connect_async`.
    """

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._client: Final = client
        self._claims: Final[dict[str, Claims]] = {}
        self._put: Final = client.register_script(_PUT.text)

    def claims(self, name: str) -> Claims:
        """Return the claims of an endpoint. Items are event ids."""
        if name not in self._claims:
            self._claims[name] = Claims(self._client, f"webhook:{name}", seconds=LEASE_SECONDS)
        return self._claims[name]

    async def put(self, event: Event, name: str) -> bool:
        """Add a delivery; return False if it exists, or was done a short time ago."""
        claims = self.claims(name)
        keys = _PUT.keys(
            due=claims.due_key,
            tokens=claims.token_key,
            delivery=delivery_key(name, event.id),
            undelivered=undelivered_key(name),
        )
        return bool(await self._put(keys=keys, args=(event.id, _ENCODER.encode(Delivery(event)), LIFE_SECONDS)))

    async def delivery(self, name: str, event_id: str) -> Delivery | None:
        """Return the delivery; None if it has expired."""
        packed = await self._client.get(delivery_key(name, event_id))
        return _DECODER.decode(packed) if isinstance(packed, bytes) else None

    async def retry(self, name: str, claim: Claim, delivery: Delivery, *, after: float) -> bool:
        """Record a failed attempt, and make the delivery due in `after` seconds; return False if the claim is lost."""
        packed = _ENCODER.encode(Delivery(delivery.event, delivery.failed + 1))
        claims = self.claims(name)
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.set(delivery_key(name, claim.item), packed, xx=True, keepttl=True)
            pipe.expire(claims.token_key, LIFE_SECONDS)
            await pipe.execute()
        return await claims.release(claim, after=after)

    async def finish(self, name: str, claim: Claim, delivery: Delivery | None) -> bool:
        """Record that the delivery is done or has expired; return False if the claim is lost."""
        async with self._client.pipeline(transaction=True) as pipe:
            if delivery is not None:
                packed = _ENCODER.encode(Delivery(delivery.event, delivery.failed, is_done=True))
                pipe.set(delivery_key(name, claim.item), packed, ex=_REMEMBERED_SECONDS)
            pipe.zrem(undelivered_key(name), claim.item)
            await pipe.execute()
        return await self.claims(name).finish(claim)

    async def waiting(self, names: Iterable[str]) -> dict[str, tuple[int, float]]:
        """Return for each endpoint the number of undelivered events, and when the oldest was published.

        The time is in Unix seconds. It is infinite if there are no undelivered events.
        """
        names = list(names)
        async with self._client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.zcard(self.claims(name).due_key)
                pipe.zrange(undelivered_key(name), 0, 0, withscores=True)
            answers = await pipe.execute()
        return {
            name: (count, oldest[0][1] / 1000 if oldest else math.inf)
            for name, count, oldest in zip(names, answers[::2], answers[1::2], strict=True)
        }


@dataclass(frozen=True, slots=True)
class Attempt:
    """The result of one POST."""

    status: int | None = None
    """None if there was no response."""
    failure: str = ""
    """Why there was no response, for the log."""
    retry_after: float | None = None
    """The receiver's Retry-After, in seconds."""

    @property
    def is_delivered(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


def retry_delay(attempt: Attempt, *, failed_before: int, jitter: float) -> float | None:
    """Return the seconds from a failed attempt to the next one; None: the event is given up.

    Args:
        failed_before: failed attempts of this delivery before this one.
        jitter: from 0 to 1.
    """
    if attempt.status == 410 or failed_before + 1 >= len(SCHEDULE):
        return None
    asked = min(attempt.retry_after or 0.0, _LONGEST_WAIT)
    return max(SCHEDULE[failed_before + 1] * (1 + JITTER * jitter), asked)
