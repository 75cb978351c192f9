"""`Outbox`: deliveries in Redis. Each endpoint has Claims of its own, so a slow endpoint does not delay the others.

One script announces an event to an endpoint, atomically and at most once.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from headrace_gateway.claims import Claim, Claims
from headrace_gateway.redis_keys import endpoint_key, event_key, undelivered_key
from headrace_gateway.scripts import script
from headrace_gateway.webhooks.endpoint_file import Endpoint
from headrace_gateway.webhooks.event import Event
from headrace_gateway.webhooks.retries import LIFE_SECONDS, Decision

if TYPE_CHECKING:
    import redis.asyncio

_PUT: Final = script("claims_prelude", "webhooks_put")
_NOTE: Final = script("claims_prelude", "webhooks_note")
_LEVELS: Final = script("webhooks_levels")
LEASE_SECONDS: Final = 45.0
"""Longer than an attempt: the claim of a replica that has died expires after it."""
_REMEMBERED_SECONDS: Final = 3600
"""A delivered event that is announced again is recognised for this long."""
_DONE: Final = b"done"
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Event)


@dataclass(frozen=True, slots=True)
class Delivery:
    """An undelivered event for one endpoint."""

    event: Event
    failed: int
    """Failed attempts so far."""
    slowed: int
    """Pauses of the endpoint since its last success."""


@dataclass(frozen=True, slots=True)
class Level:
    """The state of an endpoint's deliveries."""

    due: int
    undelivered: int
    oldest_seconds: int
    is_paused: bool
    is_disabled: bool


class Outbox:
    """Methods raise redis-py's errors.

    Args:
        client: from the broker's `connections.connect_async`.
    """

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._client: Final = client
        self._claims: Final[dict[str, Claims]] = {}
        self._put: Final = client.register_script(_PUT.text)
        self._note: Final = client.register_script(_NOTE.text)
        self._levels: Final = client.register_script(_LEVELS.text)

    def claims(self, name: str) -> Claims:
        """Return the claims of the endpoint with this name. Items are event ids."""
        if name not in self._claims:
            self._claims[name] = Claims(self._client, f"webhook:{name}", seconds=LEASE_SECONDS)
        return self._claims[name]

    async def put(self, event: Event, endpoint: Endpoint) -> bool:
        """Add a delivery; return False if it exists, is done, or the endpoint is disabled."""
        args = (event.id, endpoint.name, _ENCODER.encode(event), LIFE_SECONDS, _digest(endpoint))
        return bool(await self._put(keys=self._keys(event.id, endpoint.name), args=args))

    async def delivery(self, event_id: str, name: str) -> Delivery | None:
        """Return the delivery; None if it is done or the event has expired."""
        packed, failed = await self._client.hmget(event_key(event_id), ["", name])
        if not isinstance(packed, bytes) or failed is None or failed == _DONE:
            return None
        slowed = await self._client.hget(endpoint_key(name), "slowed")
        return Delivery(_DECODER.decode(packed), int(failed), int(slowed or 0))

    async def note(self, claim: Claim, endpoint: Endpoint, decision: Decision, *, failed: int) -> bool:
        """Record an attempt and release the claim; return False if the claim is lost.

        If the replica dies before that, the event is sent again when the claim expires.
        """
        is_done = decision.outcome in ("delivered", "given_up")
        noted = await self._write_note(
            claim,
            endpoint.name,
            "done" if is_done else failed,
            pause=decision.pause,
            disable=_digest(endpoint) if decision.outcome == "gone" else "",
            is_taken=decision.outcome == "delivered",
        )
        claims = self.claims(endpoint.name)
        return noted and await (claims.finish(claim) if is_done else claims.put_back(claim, after=decision.after))

    async def is_kept(self, event_id: str) -> bool:
        """Return whether the event is remembered: it has not expired, or was delivered a short time ago."""
        return bool(await self._client.exists(event_key(event_id)))

    async def drop(self, claim: Claim, name: str) -> bool:
        """Delete a delivery that no endpoint wants; return False if the claim is lost."""
        return await self._write_note(claim, name, "done") and await self.claims(name).finish(claim)

    async def _write_note(
        self,
        claim: Claim,
        name: str,
        state: str | int,
        *,
        pause: float = 0.0,
        disable: str = "",
        is_taken: bool = False,
    ) -> bool:
        args = [*claim, name, state, round(pause * 1000), disable, int(is_taken), _REMEMBERED_SECONDS, LIFE_SECONDS]
        return bool(await self._note(keys=self._keys(claim.item, name), args=args))

    async def levels(self, endpoints: Sequence[Endpoint]) -> list[Level]:
        """Return the state of each endpoint, in one call to Redis."""
        names = [endpoint.name for endpoint in endpoints]
        keys = _LEVELS.keys(
            due=[self.claims(name).due_key for name in names],
            undelivered=[*map(undelivered_key, names)],
            endpoint=[*map(endpoint_key, names)],
        )
        rows: list[list[Any]] = await self._levels(keys=keys) if keys else []
        return [
            Level(due, undelivered, oldest, paused > 0, disabled.decode() == _digest(endpoint))
            for endpoint, (due, undelivered, oldest, paused, disabled) in zip(endpoints, rows, strict=True)
        ]

    def _keys(self, event_id: str, name: str) -> list[str]:
        claims = self.claims(name)
        return _PUT.keys(  # as of the note
            due=claims.due_key,
            tokens=claims.token_key,
            event=event_key(event_id),
            undelivered=undelivered_key(name),
            endpoint=endpoint_key(name),
        )


async def enable(client: "redis.asyncio.Redis", name: str) -> bool:
    """Re-enable an endpoint whose receiver answered 410; return False if it was not disabled."""
    return bool(await client.hdel(endpoint_key(name), "disabled"))


def _digest(endpoint: Endpoint) -> str:
    """Disabling applies to the URL: if the operator changes it, the endpoint is enabled."""
    return hashlib.blake2b(endpoint.url.encode(), digest_size=16).hexdigest()
