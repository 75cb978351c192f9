"""`BatchStore`: batches in Redis, each a hash. Their lines and answers are on disk only.

The replica that runs a batch writes to it with the token of its claim. Redis compares the token atomically, so a paused
replica that has lost its claim cannot change the batch.
"""

import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from headrace_broker.server.stream_servers import AsyncStreamServers
from headrace_gateway.batch.record import Batch, BatchRecord, Committed
from headrace_gateway.errors import ApiError, HeadraceGatewayError
from headrace_gateway.files.stored_files import owner_of
from headrace_gateway.http.broker_errors import NO_RETRY, not_found
from headrace_gateway.keys.api_key import ApiKey
from headrace_gateway.redis.claims import Claim, Claims
from headrace_gateway.redis.keys import BATCH_SECONDS, REDIS_ID_KEY, batch_key, batches_key, script
from headrace_gateway.redis.read_requests import expire_requests
from headrace_wire.codes import GatewayCode

if TYPE_CHECKING:
    import redis.asyncio

CLAIMS: Final = "batches"
_CLAIM_SECONDS: Final = 10.0
_CREATE: Final = script("batch_create")
_WRITE: Final = script("batch_write")
CANCEL: Final = script("batch_cancel")
MOST_OPEN: Final = 16
"""Batches of one key that may be open at the same time."""
_MOST_KEPT: Final = 1000
"""Batches of one key that are stored. A new one replaces the oldest that has ended."""
_ID: Final = re.compile(r"batch_[0-9a-f]{32}")
_SEGMENT: Final = "seg:"
_AT: Final = "at:"
_RECORD: Final = msgspec.msgpack.Decoder(BatchRecord)
_COMMITTED: Final = msgspec.msgpack.Decoder(Committed)
_ENCODE: Final = msgspec.msgpack.Encoder().encode


class ClaimLostError(HeadraceGatewayError):
    """Another replica holds the batch now, or Redis has lost it."""


class BatchStore:
    """Stores batches. Methods raise redis-py's errors.

    Args:
        client: from the broker's `connections.connect_async`.
        streams: the servers that have the streams.
    """

    def __init__(self, client: "redis.asyncio.Redis", streams: AsyncStreamServers) -> None:
        self._client: Final = client
        self._streams: Final = streams
        self.claims: Final = Claims(client, CLAIMS, seconds=_CLAIM_SECONDS)
        self._create: Final = client.register_script(_CREATE.text)
        self._write: Final = client.register_script(_WRITE.text)
        self._cancel: Final = client.register_script(CANCEL.text)

    async def create(self, record: BatchRecord) -> Batch:
        """Store a new batch and make it available to the replicas. Raises ApiError 429 if its key has too many."""
        fields = {"record": _ENCODE(record), "status": "validating"}
        owner = owner_of(record.key, record.tenant)
        keys = _CREATE.keys(batch=batch_key(record.id), batches=batches_key(owner), due=self.claims.due_key)
        args = [record.id, BATCH_SECONDS * 1000, MOST_OPEN, _MOST_KEPT, *_flat(fields)]
        if not await self._create(keys=keys, args=args):
            message = f"a key may have {MOST_OPEN} batches that have not ended: cancel one, or wait until one ends"
            raise ApiError(429, "rate_limit_error", GatewayCode.TOO_MANY_BATCHES, message, headers=NO_RETRY)
        return Batch(record, "validating")

    async def find(self, batch_id: str) -> Batch | None:
        """Return a batch, whichever key owns it."""
        fields: Any = await self._client.hgetall(batch_key(batch_id)) if _ID.fullmatch(batch_id) else {}
        return _read({name.decode(): value for name, value in fields.items()}) if b"record" in fields else None

    async def get(self, batch_id: str, key: ApiKey) -> Batch:
        """Return a batch of this key. Raises ApiError 404."""
        batch = await self.find(batch_id)
        if batch is None or (batch.record.key, batch.record.tenant) != (key.name, key.tenant):
            raise not_found(f"this key has no batch {batch_id[:80]!r}")
        return batch

    async def list(self, key: ApiKey, after: str | None, limit: int) -> list[Batch] | None:
        """Return the key's batches, newest first; None if `after` is not one of them."""
        listed: Any = await self._client.zrange(batches_key(owner_of(key.name, key.tenant)), 0, -1, desc=True)
        ids = [each.decode() for each in listed]
        if after is not None:
            if after not in ids:
                return None
            ids = ids[ids.index(after) + 1 :]
        found: list[Batch] = []
        for batch_id in ids:
            if len(found) == limit:
                break
            batch = await self.find(batch_id)
            found += [] if batch is None else [batch]
        return found

    async def status(self, batch_id: str) -> str | None:
        """Return the status; None if Redis has lost the batch."""
        status: Any = await self._client.hget(batch_key(batch_id), "status")
        return None if status is None else status.decode()

    async def cancel(self, batch_id: str) -> str:
        """Request cancellation; return the status that the batch had."""
        keys = CANCEL.keys(batch=batch_key(batch_id), tokens=self.claims.token_key)
        status: bytes = await self._cancel(keys=keys, args=[int(time.time()), batch_id])
        return status.decode()

    async def expire_requests(self, request_ids: Sequence[str]) -> None:
        """Let the requests of a line expire once its answer is committed: nothing reads them again."""
        await expire_requests(self._streams, request_ids)

    async def redis_id(self, new: str | None = None) -> str | None:
        """Return the random id of this Redis. If it has none, `new` becomes its id."""
        if new is not None:
            await self._client.set(REDIS_ID_KEY, new, nx=True)
        kept: Any = await self._client.get(REDIS_ID_KEY)
        return None if kept is None else kept.decode()

    async def commit(self, claim: Claim, segment: str, committed: Committed) -> None:
        """Record how many bytes of a segment are committed. Raises ClaimLostError."""
        fields = {f"{_SEGMENT}{segment}": _ENCODE(committed)}
        if await self._written(claim, ("in_progress", "cancelling"), fields):
            raise ClaimLostError(claim.item)

    async def move(self, claim: Claim, before: tuple[str, ...], status: str, **fields: Any) -> bool:
        """Set the status and other fields; return False if the current status is not in `before`.

        Raises ClaimLostError.
        """
        packed = {name: _ENCODE(value) for name, value in fields.items()}
        written = {**packed, "status": status, f"{_AT}{status}": str(int(time.time()))}
        return not await self._written(claim, before, written)

    async def _written(self, claim: Claim, statuses: tuple[str, ...], fields: Mapping[str, Any]) -> str:
        args = [claim.item, claim.token, ",".join(statuses), *_flat(fields)]
        keys = _WRITE.keys(batch=batch_key(claim.item), tokens=self.claims.token_key)
        answer: bytes = await self._write(keys=keys, args=args)
        if answer == b"lost":
            raise ClaimLostError(claim.item)
        return answer.decode()


def _read(fields: Mapping[str, bytes]) -> Batch:
    segments = {
        name.removeprefix(_SEGMENT): _COMMITTED.decode(value)
        for name, value in sorted(fields.items())
        if name.startswith(_SEGMENT)
    }
    times = {name.removeprefix(_AT): int(value) for name, value in fields.items() if name.startswith(_AT)}
    rest = ("total", "model", "errors", "output_file_id", "error_file_id", "ends_as")
    others: dict[str, Any] = {name: msgspec.msgpack.decode(fields[name]) for name in rest if name in fields}
    return Batch(_RECORD.decode(fields["record"]), fields["status"].decode(), times=times, segments=segments, **others)


def _flat(fields: Mapping[str, Any]) -> list[Any]:
    return [part for pair in fields.items() for part in pair]
