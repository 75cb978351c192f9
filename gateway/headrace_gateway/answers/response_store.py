"""`ResponseStore`: stores for the Responses API what must outlive a stream: a request's input, and later its end.

The envelope has the fields that the request determines. It is kept as long as the response. The stored `state` is the
object that `ResponseStream.state` returns.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from headrace_broker.keys import IDEMPOTENCY_SECONDS, result_key, stream_key
from headrace_broker.server.asking_homes import unless_away_async
from headrace_broker.server.shards import id_in_keys
from headrace_broker.server.stream_servers import AsyncStreamServers
from headrace_broker.server.stream_table import MAIN
from headrace_gateway.answers.envelope import Envelope, EnvelopeStore
from headrace_gateway.errors import ApiError, invalid
from headrace_gateway.redis.claims import Claim, Claims
from headrace_gateway.redis.keys import deleted_key, envelope_key, response_key, script
from headrace_gateway.requests.call import ResponseOptions
from headrace_wire.codes import GatewayCode

if TYPE_CHECKING:
    import redis.asyncio

MAX_STORED_BYTES: Final = 4 * 2**20
"""Limit of the input of one response. Its output has the same limit."""
_TOO_LARGE: Final = "too_large"
_PUT: Final = script("response_put")
_FINISH: Final = script("response_finish")
_ENCODE: Final = msgspec.json.Encoder().encode
_DECODE: Final = msgspec.json.Decoder().decode

Items = list[dict[str, Any]]


class ResponseStore:
    """Stored responses.

    Args:
        client: from the broker's `connections.connect_async`.
        streams: the servers that have the streams.
        claims: the responses whose end `ResponseCollector` has to store.
        life: seconds that an object is stored after its end.
    """

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        streams: AsyncStreamServers,
        envelopes: EnvelopeStore,
        claims: Claims,
        life: float,
    ) -> None:
        self._client: Final = client
        self._streams: Final = streams
        self._envelopes: Final = envelopes
        self._claims: Final = claims
        self._life: Final = max(1, round(life))
        self._put: Final = client.register_script(_PUT.text)
        self._finish: Final = client.register_script(_FINISH.text)

    async def put(self, envelope: Envelope, input_items: Sequence[dict[str, Any]]) -> None:
        """Store the envelope and the input of a request, and schedule the collection of its end.

        The claim is added last: if a collector finds no envelope, it treats the response as deleted.

        Raises ApiError 400 if the input is too large.
        """
        assert isinstance(envelope.options, ResponseOptions)
        has_ended = False
        if envelope.options.store:
            packed = _ENCODE(input_items)
            size = len(packed) + len(_ENCODE(envelope.options.config))
            if size > MAX_STORED_BYTES:
                message = f"the input takes {size} bytes, and at most {MAX_STORED_BYTES} can be stored: "
                raise invalid(
                    f"{message}shorten it, or send store: false", code=GatewayCode.RESPONSE_TOO_LARGE, param="store"
                )
            keys = _PUT.keys(response=response_key(envelope.id))
            has_ended = bool(await self._put(keys=keys, args=[packed, self._envelopes.life(envelope)]))
        await self._envelopes.put(envelope)
        if not has_ended and (envelope.options.store or envelope.options.background):
            await self._claims.add(envelope.id, after=1.0)

    async def delete(self, response_id: str, *, had_ended: bool) -> None:
        """Delete the response at once. A marker stays for as long as an Idempotency-Key is bound to the response.

        Args:
            had_ended: whether the response had ended. If so, its stream and its result are deleted too. A worker may
                still write to the stream of a response that was just cancelled.
        """
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.delete(envelope_key(response_id), response_key(response_id))
            if had_ended:  # a command of its own: no selector of the gateway's Redis user has all four keys
                pipe.delete(stream_key(response_id), result_key(response_id))
            pipe.set(deleted_key(response_id), "1", ex=IDEMPOTENCY_SECONDS)
            await pipe.execute()
        for home in await self._streams.homes(response_id) if had_ended else ():
            if home != MAIN:
                # nobody can read the stream without the envelope, and it expires by itself
                async with unless_away_async(home):
                    await (await self._streams.of(home)).delete(stream_key(id_in_keys(home, response_id)))

    async def kept(self, response_id: str) -> tuple[int, int]:
        """Return the number of stored bytes of a response, and the seconds until they expire."""
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.hstrlen(response_key(response_id), "input")
            pipe.hstrlen(response_key(response_id), "state")
            pipe.strlen(envelope_key(response_id))
            pipe.ttl(envelope_key(response_id))
            *sizes, life = await pipe.execute()
        return sum(sizes), max(0, life)

    async def was_deleted(self, response_id: str) -> bool:
        return bool(await self._client.exists(deleted_key(response_id)))

    async def input_items(self, response_id: str) -> Items | None:
        """Return the input items; None if none are stored."""
        packed = await self._client.hget(response_key(response_id), "input")
        return None if packed is None else _DECODE(packed)

    async def has_ended(self, response_id: str) -> bool:
        """Return whether the end is stored."""
        return bool(await self._client.hexists(response_key(response_id), "state"))

    async def state(self, response_id: str) -> dict[str, Any] | None:
        """Return how the response ended; None if its end is not stored.

        Raises ApiError 404 if it was too large to be stored.
        """
        packed = await self._client.hget(response_key(response_id), "state")
        state: dict[str, Any] | None = None if packed is None else _DECODE(packed)
        if state is not None and _TOO_LARGE in state:
            message = f"the response has {state[_TOO_LARGE]} bytes, and at most {MAX_STORED_BYTES} are stored"
            raise ApiError(404, "invalid_request_error", GatewayCode.RESPONSE_TOO_LARGE, message)
        return state

    async def finish(self, claim: Claim, state: dict[str, Any]) -> str | None:
        """Store the end once, and return the status that is stored; None if the claim is lost.

        If the response could not run, for example because it exceeds the context, its input is deleted.
        """
        packed = _ENCODE(state)
        if len(packed) > MAX_STORED_BYTES:
            packed = _ENCODE({_TOO_LARGE: len(packed), "status": state["status"]})
        keys = _FINISH.keys(
            tokens=self._claims.token_key, response=response_key(claim.item), envelope=envelope_key(claim.item)
        )
        lives = self._life, self._envelopes.result_ttl
        has_run = state["status"] != "failed" or bool(state.get("output"))
        found: int | bytes = await self._finish(keys=keys, args=[*claim, packed, *lives, int(has_run)])
        if isinstance(found, bytes):  # a replica died before it published the end
            return str(_DECODE(found).get("status", state["status"]))
        return str(state["status"]) if found else None
