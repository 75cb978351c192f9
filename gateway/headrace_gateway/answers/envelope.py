"""The envelope: the record with which a replica can write the answer of a request that another replica accepted.

The accepting replica writes it to Redis before it submits the request. Any replica reads it to retrieve the answer.
The ids of the objects in an answer are derived from the answer's id, so that every replica writes the same ids.
"""

import hashlib
import re
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from headrace_gateway.errors import ApiError
from headrace_gateway.http.broker_errors import not_found
from headrace_gateway.keys.api_key import ApiKey
from headrace_gateway.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from headrace_gateway.redis.keys import envelope_key
from headrace_gateway.requests.call import AnswerOptions, Call, ParsedOptions
from headrace_wire.codes import GatewayCode

if TYPE_CHECKING:
    import redis.asyncio

_PREFIXES: Final = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
VERSION: Final = 1
"""Increase it if older replicas would write other answers. A replica refuses an envelope of another version."""


def new_id(prefix: str) -> str:
    """Return an id that cannot be guessed: a prefix such as `chatcmpl-` or `resp_`, and 128 random bits."""
    return f"{prefix}{secrets.token_hex(16)}"


def call_id(completion_id: str, choice: int, call: int) -> str:
    """Return the id of a tool call."""
    seed = f"{completion_id}/{choice}/{call}".encode()
    return f"call_{hashlib.blake2b(seed, digest_size=12).hexdigest()}"


def item_id(kind: str, response_id: str, place: int | str) -> str:
    """Return the id of an item, such as `msg_<digits of the response>_0`. It shows which response contains the item."""
    return f"{kind}_{response_id.rpartition('_')[2]}_{place}"


def with_ids(items: Sequence[dict[str, Any]], response_id: str) -> tuple[dict[str, Any], ...]:
    """Return input items as a response lists them: each has an id, either its own or a derived one."""
    return tuple(
        {"id": item_id(_PREFIXES[item["type"]], response_id, f"i{place}"), **item} for place, item in enumerate(items)
    )


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted request. `id`, such as `chatcmpl-...`, is also the id of the first request in the queue."""

    id: str
    request_ids: tuple[str, ...]
    """One per prompt, in the order of the choices."""
    created: int
    """Unix seconds."""
    model: str
    key: str
    """Name of the API key that owns the request."""
    tenant: str | None
    options: AnswerOptions
    expires: int
    """Seconds after `created` at which the request expires in the queue."""
    due: int | None = None
    """Unix seconds at which the answer should be complete; None: as soon as possible."""
    version: int = VERSION
    tokens_per_minute: int | None = None
    """The key's limit. A collector charges an answer that no client reads against it."""
    counted_bytes: int = 0
    """Bytes that `StoredBytes` counts for the request until its answer has ended."""

    @classmethod
    def of(cls, call: Call, answer_id: str, key: ApiKey, *, expires: int) -> Self:
        """Return the envelope of a new request."""
        further = (f"{answer_id}.{number}" for number in range(1, len(call.requests)))
        created = int(time.time())
        return cls(
            id=answer_id,
            request_ids=(answer_id, *further),
            created=created,
            due=None if call.window is None else created + call.window,
            model=call.model,
            key=key.name,
            tenant=key.tenant,
            tokens_per_minute=key.tokens_per_minute,
            options=call.options,
            expires=expires,
        )

    def chunk_head(self, kind: str) -> dict[str, Any]:
        """Return the fields that every chunk of the answer has. `kind` is OpenAI's `object`."""
        head: dict[str, Any] = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head if self.options.service_tier is None else {**head, "service_tier": self.options.service_tier}


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

    def size(self, envelope: Envelope) -> int:
        """Return the bytes that `put` stores."""
        return len(_ENCODER.encode(envelope))

    def life(self, envelope: Envelope) -> int:
        """Return the default life of the envelope, in seconds from now."""
        return envelope.expires + self.kept_beyond

    def is_old(self, envelope: Envelope) -> bool:
        """Return whether the mark of the request's end may have expired, if it ended at once."""
        return time.time() > envelope.created + self.kept_beyond

    @property
    def kept_beyond(self) -> int:
        """Seconds that an envelope is kept after its request has expired."""
        return self.result_ttl + _KEPT_BEYOND

    async def get(self, answer_id: str, key: ApiKey) -> Envelope:
        """Return the envelope of an answer that this key may read.

        Raises ApiError 404 if there is none or another key owns it, and 503 if a replica of another release wrote it.
        """
        envelope = await self.find(answer_id)
        if envelope is None or envelope.key != key.name or envelope.tenant != key.tenant:
            raise not_found(f"no answer {answer_id[:80]!r}: it has expired, or this key does not own it")
        check_release(envelope)
        return envelope

    async def find(self, answer_id: str) -> Envelope | None:
        """Return the envelope, whichever key owns it; None if there is none.

        Raises ApiError 503 if this replica cannot decode it.
        """
        packed = await self._client.get(envelope_key(answer_id)) if _ID.fullmatch(answer_id) else None
        if not isinstance(packed, bytes):
            return None
        try:
            return _DECODER.decode(packed)
        except msgspec.ValidationError:
            raise _other_release() from None


def check_release(envelope: Envelope) -> None:
    """Raise ApiError 503 if only a replica of another release can write the answer."""
    if envelope.version != VERSION or (
        isinstance(envelope.options, ParsedOptions) and not _knows_parsers(envelope.options)
    ):
        raise _other_release()


def _knows_parsers(options: ParsedOptions) -> bool:
    return options.tool_parser in {None, *TOOL_PARSERS} and options.reasoning_parser in {None, *REASONING_PARSERS}


def _other_release() -> ApiError:
    message = "a gateway of another release accepted this request: try again to reach another replica"
    return ApiError(503, "server_error", GatewayCode.OTHER_RELEASE, message, headers={"retry-after": "1"})
