"""The envelope: what a replica needs to write the answer of a request that another replica accepted.

The accepting replica writes it to Redis before it submits the request. Any replica reads it to retrieve the answer.
"""

import re
import time
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from headrace_gateway.broker_errors import not_found
from headrace_gateway.call import AnswerForm, Call, ParsedForm
from headrace_gateway.errors import ApiError
from headrace_gateway.keys import ApiKey
from headrace_gateway.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from headrace_gateway.redis_keys import envelope_key

if TYPE_CHECKING:
    import redis.asyncio

VERSION: Final = 1
"""Increased if answers written by an older replica would differ. A replica refuses a version that it does not know."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted request. `id` is OpenAI's, such as `chatcmpl-...`, and the id of the first request in the queue."""

    id: str
    request_ids: tuple[str, ...]
    """One per prompt, in the order of the choices."""
    created: int
    """Unix seconds."""
    model: str
    key: str
    """Name of the API key that owns the request."""
    tenant: str | None
    form: AnswerForm
    expires: int
    """Seconds after `created` at which the request expires in the queue."""
    version: int = VERSION

    @classmethod
    def of(cls, call: Call, answer_id: str, key: ApiKey, *, expires: int) -> Self:
        """Return the envelope of a new request."""
        further = (f"{answer_id}.{number}" for number in range(1, len(call.submissions)))
        return cls(
            id=answer_id,
            request_ids=(answer_id, *further),
            created=int(time.time()),
            model=call.model,
            key=key.name,
            tenant=key.tenant,
            form=call.form,
            expires=expires,
        )

    def chunk_head(self, kind: str) -> dict[str, Any]:
        """Return the fields that every chunk of the answer has. `kind` is OpenAI's `object`."""
        head: dict[str, Any] = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head if self.form.service_tier is None else {**head, "service_tier": self.form.service_tier}


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Envelope)
_ID: Final = re.compile(r"((chatcmpl|cmpl)-|resp_|msg_)[0-9a-f]{32}")
_KEPT_BEYOND: Final = 3600
"""Seconds that an envelope outlives its stream, so that a late reader learns why the stream is gone."""


class EnvelopeStore:
    """Stores envelopes in Redis.

    Args:
        client: from the broker's `connections.connect_async`.
        result_ttl: seconds that the queue keeps a stream after its last entry.
    """

    def __init__(self, client: "redis.asyncio.Redis", result_ttl: int) -> None:
        self._client: Final = client
        self.result_ttl: Final = result_ttl

    async def put(self, envelope: Envelope) -> None:
        """Store it until an hour after both the request and its stream have expired."""
        await self._client.set(envelope_key(envelope.id), _ENCODER.encode(envelope), ex=self.life(envelope), nx=True)

    def life(self, envelope: Envelope) -> int:
        """Return the default life of the envelope, in seconds from now."""
        return envelope.expires + self.kept_beyond

    @property
    def kept_beyond(self) -> int:
        """Seconds that an envelope is kept after its request has expired."""
        return self.result_ttl + _KEPT_BEYOND

    async def get(self, answer_id: str, key: ApiKey) -> Envelope:
        """Return the envelope of an answer that this key may read.

        Raises ApiError 404 if there is none or another key owns it, and 503 if only a newer replica can read it.
        """
        envelope = await self.find(answer_id)
        if envelope is None or envelope.key != key.name or envelope.tenant != key.tenant:
            raise not_found(f"no answer {answer_id[:80]!r}: it has expired, or this key does not own it")
        check_release(envelope)
        return envelope

    async def find(self, answer_id: str) -> Envelope | None:
        """Return the envelope whichever key owns it. Administrators see that an answer exists, not what it says.

        Raises ApiError 503 if only a newer replica can read it.
        """
        packed = await self._client.get(envelope_key(answer_id)) if _ID.fullmatch(answer_id) else None
        if not isinstance(packed, bytes):
            return None
        try:
            return _DECODER.decode(packed)
        except msgspec.ValidationError:
            raise _other_release() from None


def check_release(envelope: Envelope) -> None:
    """Raise ApiError 503 if only a newer replica can write the answer."""
    if envelope.version != VERSION or (isinstance(envelope.form, ParsedForm) and not _knows_parsers(envelope.form)):
        raise _other_release()


def _knows_parsers(form: ParsedForm) -> bool:
    return form.tool_parser in {None, *TOOL_PARSERS} and form.reasoning_parser in {None, *REASONING_PARSERS}


def _other_release() -> ApiError:
    message = "a gateway of another release accepted this request: try again to reach another replica"
    return ApiError(503, "server_error", "other_release", message, headers={"retry-after": "1"})
