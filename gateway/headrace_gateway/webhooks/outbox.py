"""`Outbox`: deliveries in Redis. Each endpoint has Claims of its own, so a slow one holds nobody else up.

An event is announced to an endpoint in one script: it is there whole or not at all, and it is there once.
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
from headrace_gateway.webhooks.retries import LIFE_SECONDS, Verdict

if TYPE_CHECKING:
    import redis.asyncio

_PUT: Final = script("claims_prelude", "webhooks_put")
_NOTE: Final = script("claims_prelude", "webhooks_note")
_LEVELS: Final = script("webhooks_levels")
LEASE_SECONDS: Final = 45.0
"""Longer than an attempt: a replica that has died is found out by it."""
_REMEMBERED_SECONDS: Final = 3600
"""After its delivery an event that is announced again is known for so long."""
_DONE: Final = b"done"
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Event)


@dataclass(frozen=True, slots=True)
class Delivery:
    """An event for one endpoint that is not delivered yet."""

    event: Event
    failed: int
    """Attempts that have failed."""
    slowed: int
    """Pauses of the endpoint since its last success."""


@dataclass(frozen=True, slots=True)
class Level:
    """Where an endpoint stands."""

    due: int
    undelivered: int
    oldest_seconds: int
    is_paused: bool
    is_disabled: bool


class Outbox:
    """Methods raise Redis's errors.

    Args:
        client: from the broker's `connections.connect_async`.
    """

    def __init__(self, client: "redis.asyncio.Redis", *, lease_seconds: float = LEASE_SECONDS) -> None:
        self._client: Final = client
        self._lease_seconds: Final = lease_seconds
        self._claims: Final[dict[str, Claims]] = {}
        self._put: Final = client.register_script(_PUT.text)
        self._note: Final = client.register_script(_NOTE.text)
        self._levels: Final = client.register_script(_LEVELS.text)

    def claims(self, name: str) -> Claims:
        """The work of the endpoint with this name: items are ids of events."""
        if name not in self._claims:
            self._claims[name] = Claims(self._client, f"webhook:{name}", seconds=self._lease_seconds)
        return self._claims[name]

    async def put(self, event: Event, endpoint: Endpoint) -> bool:
        """Add a delivery; False where it is there or done already, or the endpoint is disabled."""
        args = (event.id, endpoint.name, _ENCODER.encode(event), LIFE_SECONDS, _digest(endpoint))
        return bool(await self._put(keys=self._keys(event.id, endpoint.name), args=args))

    async def delivery(self, event_id: str, name: str) -> Delivery | None:
        """What is to be delivered; None where it is done or its life is over."""
        packed, failed = await self._client.hmget(event_key(event_id), ["", name])
        if not isinstance(packed, bytes) or failed is None or failed == _DONE:
            return None
        slowed = await self._client.hget(endpoint_key(name), "slowed")
        return Delivery(_DECODER.decode(packed), int(failed), int(slowed or 0))

    async def note(self, claim: Claim, endpoint: Endpoint, verdict: Verdict, *, failed: int) -> bool:
        """Note an attempt and let go of the claim; False where it is another's by now.

        A replica that dies in between leaves a delivery that is sent again when its claim runs out.
        """
        is_done = verdict.outcome in ("delivered", "given_up")
        noted = await self._write_note(
            claim,
            endpoint.name,
            "done" if is_done else failed,
            pause=verdict.pause,
            disable=_digest(endpoint) if verdict.outcome == "gone" else "",
            is_taken=verdict.outcome == "delivered",
        )
        claims = self.claims(endpoint.name)
        return noted and await (claims.finish(claim) if is_done else claims.put_back(claim, after=verdict.after))

    async def is_kept(self, event_id: str) -> bool:
        """Whether the event's life, or the time for which it is remembered after its delivery, is not over."""
        return bool(await self._client.exists(event_key(event_id)))

    async def drop(self, claim: Claim, name: str) -> bool:
        """Forget a delivery that nobody is to have any more; False where the claim is another's by now."""
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
        """Where each endpoint stands, in one call of Redis."""
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
    """Let an endpoint have webhooks again after its receiver answered 410; False where it was not disabled."""
    return bool(await client.hdel(endpoint_key(name), "disabled"))


def _digest(endpoint: Endpoint) -> str:
    """A disabled endpoint is its URL: where the operator gives it another one, it is enabled."""
    return hashlib.blake2b(endpoint.url.encode(), digest_size=16).hexdigest()
