"""The writing side of a request's stream: claim, publish, end. The reading side is in `subscriber.py`.

Redis accepts an entry only if its ID is above the stream's last. The ID is `<attempt>-<tokens so far>`, so Redis itself
rejects every duplicate and every write of a fenced worker: one whose request another worker has claimed. That holds
even if the fenced worker has generated more tokens than its successor.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal, Self, TypeAlias

import msgpack
import redis

from headrace_broker.keys import (
    CONTENT_DIGITS,
    ENDED_SECONDS,
    ENGINE_LOSSES_SECONDS,
    PROBE_KEY,
    REQUEUED_SECONDS,
    ended_key,
    engine_losses_key,
    shard_probe_key,
    stream_key,
)
from headrace_broker.models.identity import ModelIdentity
from headrace_broker.packing import pack, pack_rows
from headrace_broker.results import ErrorInfo, PromptLogprobs, TokenLogprobs, Usage, logprob_bytes_to_wire
from headrace_broker.scripts import script
from headrace_broker.server.connections import REDIS_ERRORS
from headrace_broker.server.held_connection import HeldConnection
from headrace_broker.server.shards import key_prefix
from headrace_broker.server.stream_table import MAIN
from headrace_broker.streams.events import (
    ChunkEvent,
    EndEvent,
    RowsEvent,
    StartEvent,
    StreamEvent,
    read_entry,
    read_flat_entry,
)
from headrace_broker.streams.grant import Grant
from headrace_wire.wire_number import WIRE_NUMBER

END_STREAM: Final = script("stream_prelude", "stream_end")
_CLAIM: Final = script("stream_prelude", "stream_claim")
_PUBLISH: Final = script("stream_prelude", "stream_publish")

_ENDED: Final = 1
_OF_ANOTHER_MESSAGE: Final = 2
_STALE: Final = 3
"""States of a claim that `stream_claim.lua` returns."""

Attempt: TypeAlias = tuple[str, int]
"""A request's id and the number of an attempt. One worker may make more than one attempt."""


class WriteOutcome(StrEnum):
    """Why Redis did not accept a write. The writer must stop generating, unless a retry after ROLLED_BACK succeeds."""

    FENCED = "fenced"  # another worker has taken over or ended the request
    CANCELLED = "cancelled"  # a client cancelled it
    GONE = "gone"  # the stream has expired or was deleted
    ROLLED_BACK = "rolled_back"
    """The server lost writes that it had accepted. Either this entry would leave a gap, or the claim was lost, and
    another worker with the same attempt number has written these tokens."""


class Ending(StrEnum):
    """The outcome of ending a stream without a claim."""

    WRITTEN = "written"
    HAD_ENDED = "had ended"
    OF_ANOTHER_MESSAGE = "of another message"
    """The stream belongs to another message with the same request id, and was not changed."""


@dataclass(slots=True)  # not frozen, which would cost 1 us more for each chunk
class StreamWrite:
    """One entry to publish. `chunk` and `end` make it with the right id and data. It must not be changed afterwards."""

    request_id: str
    attempt: int
    entry_id: str
    entry_before: str
    """The id of the previous entry, with this attempt's number even if an earlier attempt wrote that entry."""
    type: Literal["chunk", "end"]
    data: bytes = field(repr=False)
    """Packed at once, because the garbage collector does not traverse bytes."""

    @property
    def key(self) -> Attempt:
        return self.request_id, self.attempt

    @classmethod
    def chunk(
        cls,
        request_id: str,
        attempt: int,
        offset: int,
        *,
        index: int,
        token_ids: list[int],
        text: str,
        logprobs: TokenLogprobs | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
        choice_tokens: int | None = None,
    ) -> Self:
        """Make the entry of a chunk. `offset` counts the tokens of all choices and attempts, including this chunk.

        `choice_tokens` counts those of this choice alone. It is needed if the request has several.
        Within an attempt every chunk needs an offset of its own. So text without a token must be sent with the next
        token, or with the choice's last chunk.
        """
        data: dict[str, Any] = {"index": index, "token_ids": token_ids, "text": text, "logprobs": logprobs}
        if logprobs is not None:
            data |= logprob_bytes_to_wire("logprob_bytes", logprobs)
        if prompt_logprobs is not None:
            data["prompt_logprobs"] = prompt_logprobs
            data |= logprob_bytes_to_wire("prompt_logprob_bytes", prompt_logprobs)
        if finish_reason is not None:
            data |= {"finish_reason": finish_reason, "stop_reason": stop_reason}
        if choice_tokens is not None:
            data["choice_tokens"] = choice_tokens
        before = f"{attempt}-{offset - len(token_ids)}"
        return cls(request_id, attempt, f"{attempt}-{offset}", before, "chunk", pack(data))

    @classmethod
    def rows(cls, request_id: str, attempt: int, first: int, count: int, data: bytes) -> Self:
        """Make the entry of rows of a pooling request. `first` counts the rows of all attempts before them."""
        packed = pack_rows({"first": first, "count": count, "bytes": data})
        return cls(request_id, attempt, f"{attempt}-{first + count}", f"{attempt}-{first}", "chunk", packed)

    @classmethod
    def end(
        cls,
        request_id: str,
        attempt: int,
        tokens: int,
        *,
        finish_reason: str,
        usage: Usage | None = None,
        error: ErrorInfo | None = None,
        **about: Any,
    ) -> Self:
        """Make the end entry, the attempt's last one. `tokens` counts the tokens, or rows, of all attempts.

        `about` are further values of the entry.
        """
        data = pack(end_data(finish_reason, usage, error) | about)
        return cls(request_id, attempt, f"{attempt}-{tokens + 1}", f"{attempt}-{tokens}", "end", data)


def pack_writes(writes: Iterable[StreamWrite]) -> bytes:
    """Encode writes as `StreamWriter.publish` sends them. `unpack_writes` decodes them."""
    entries = [(write.request_id, write.entry_id, write.entry_before, write.type, write.data) for write in writes]
    # Not by the thread's packer, whose buffer never shrinks: after an outage this encodes all tokens at once.
    packed: bytes = msgpack.packb(entries, use_bin_type=False)
    return packed


def unpack_writes(packed: bytes, request_ids: Collection[str]) -> list[StreamWrite]:
    """Decode the writes of these requests only, because there may be very many others."""
    wanted = {request_id.encode() for request_id in request_ids}
    entries = (entry for entry in msgpack.unpackb(packed, raw=True) if entry[0] in wanted)
    texts = (([part.decode() for part in entry[:4]], entry[4]) for entry in entries)
    return [
        StreamWrite(request_id, int(entry_id.partition("-")[0]), entry_id, before, kind, data)
        for (request_id, entry_id, before, kind), data in texts
    ]


def end_data(finish_reason: str, usage: Usage | None, error: ErrorInfo | None) -> dict[str, Any]:
    """Return the data of an end entry."""
    return {
        "finish_reason": finish_reason,
        "usage": usage.to_wire() if usage else None,
        "error": error.to_wire() if error else None,
    }


@dataclass(frozen=True, slots=True)
class StreamClaim:
    """The right to write to a stream as `attempt`, and the entries of earlier attempts.

    The claim failed, and the worker must not write, in three cases. If `ended` is set, the request had already ended.
    If `is_of_another_message` is true, the stream belongs to another message with the same request id. If `is_stale` is
    true, `attempt` is the last one, and was begun under another lease. If the worker still has its lease, it needs a
    higher number: `Leases.regrant`.
    """

    attempt: int
    entries: list[StreamEvent] = field(repr=False)
    ended: EndEvent | None
    engine_losses: int = 0
    """Number of engine processes of all workers that died while they ran this request."""
    is_of_another_message: bool = False
    has_replaced: bool = False
    """The stream had an id so high that no entry could follow. It was deleted and created again."""
    is_stale: bool = False

    @property
    def continues(self) -> bool:
        """Whether an earlier attempt had begun."""
        return any(entry.attempt < self.attempt for entry in self.entries)


def _of_message(digest: str) -> dict[str, str]:
    """Return the fields of a first entry that say to which message the stream belongs, from a `content_digest`.

    The digits of the queue have a field of their own. Workers of an earlier version compare the others as a whole.
    """
    fields = {"content": digest[:CONTENT_DIGITS], "queue": digest[CONTENT_DIGITS:]}
    return {name: digits for name, digits in fields.items() if digits}


def begun_with(entries: Iterable[StreamEvent], model: ModelIdentity) -> ModelIdentity | None:
    """Return the other model that computed output of these entries, if its weights differ from `model`'s; else None."""
    current: ModelIdentity | None = None
    for entry in entries:
        if isinstance(entry, StartEvent):
            current = entry.model
        elif _has_output(entry) and current is not None and current.differs_from(model):
            return current
    return None


def _has_output(entry: StreamEvent) -> bool:
    return isinstance(entry, RowsEvent) or (isinstance(entry, ChunkEvent) and bool(entry.token_ids))


def draws_of(entries: Iterable[StreamEvent]) -> set[str]:
    """Return the `draws` of each attempt that wrote tokens among these entries, if its worker gave a name."""
    names: set[str] = set()
    current: str | None = None
    for entry in entries:
        if isinstance(entry, StartEvent):
            current = entry.draws
        elif isinstance(entry, ChunkEvent) and entry.token_ids and current is not None:
            names.add(current)
    return names


class StreamWriter:
    """Writes the streams of a worker's requests at one home.

    `client` must return bytes (`connections.connect`). Only one thread may publish. Every method may be repeated if its
    reply was lost; a repeated claim without a grant begins one more attempt. Redis's errors pass through.

    `home` may be a shard of a Redis Cluster, whose slot the client serves.
    """

    def __init__(self, client: "redis.Redis", ttl_seconds: int, home: str = MAIN) -> None:
        self._client: Final = client
        self._ttl_seconds: Final = ttl_seconds
        self._prefix: Final = key_prefix(home)
        self._claim: Final = _CLAIM.bound(client)
        self._publish: Final = client.register_script(_PUBLISH.text)
        self._held: Final = HeldConnection(client)
        self._end: Final = END_STREAM.bound(client)

    def claim(
        self,
        request_id: str,
        worker_name: str,
        traceparent: str | None = None,
        abandon_after: float | None = None,
        content: str | None = None,
        model: ModelIdentity | None = None,
        prompt_tokens: int | None = None,
        prompt_tail: str | None = None,
        draws: str | None = None,
        grant: Grant | None = None,
    ) -> StreamClaim:
        """Take the request over from the worker that had it, if any. A stream that has ended is not changed.

        `content` is the digest of the message. A stream that belongs to a message of other content is not changed
        either. `grant` is the lease of the message. Its number becomes that of the attempt, unless another lease has
        begun an attempt with this number or a higher one: then the claim is stale. Without a grant, the attempt follows
        the last one, whose worker may be the rightful one.
        """
        given = {
            "worker": worker_name,
            "wire": WIRE_NUMBER,
            **_of_message(content or ""),
            "traceparent": traceparent,
            "abandon_after": abandon_after,
            **(model.to_wire() if model is not None else {}),
            "prompt_tokens": prompt_tokens,
            "prompt_tail": prompt_tail,
            "draws": draws,
            "owner": grant.owner if grant is not None else None,
        }
        start = {name: value for name, value in given.items() if value is not None}
        attempt, state, raw, losses, replaced = self._claim(
            pack(start),
            self._ttl_seconds,
            content or "",
            *((grant.number, grant.owner) if grant is not None else ("", "")),
            stream=stream_key(self._prefix + request_id),
            engine_losses=engine_losses_key(self._prefix + request_id),
            ended=ended_key(self._prefix + request_id),
        )
        entries = [read_flat_entry(entry) for entry in raw]
        last = entries[-1] if state == _ENDED else None
        ended = last if isinstance(last, EndEvent) else None
        is_of_another = state == _OF_ANOTHER_MESSAGE
        return StreamClaim(attempt, entries, ended, losses, is_of_another, bool(replaced), state == _STALE)

    def publish(self, writes: Iterable[StreamWrite], packed: bytes | None = None) -> dict[Attempt, WriteOutcome]:
        """Append all entries in one round trip. Return the attempts that had an entry refused, with the reason.

        A stream lives `ttl_seconds` from its latest entry on. If the reply was lost, publish exactly the same writes
        again before any newer ones: entries that Redis already has are then ignored. Merged writes would not be
        recognised. If an attempt was ROLLED_BACK, publish all its latest writes again, from before the gap on.

        `packed` is the result of `pack_writes`, if the caller has it already.
        """
        writes = list(writes)
        if not writes:
            return {}
        packed = packed or pack_writes(writes)
        self.send(writes, packed)
        return self.receive(writes, packed)

    def send(self, writes: Sequence[StreamWrite], packed: bytes) -> None:
        """Send a call of `publish`, to read its reply later by `receive`. Redis's errors pass through."""
        # As one argument and without KEYS: each argument costs redis-py more time than Redis needs to unpack them all.
        self._held.send(self._publish, self._arguments(packed), self._routing_keys(writes))

    def _arguments(self, packed: bytes) -> list[Any]:
        return [self._ttl_seconds, packed, self._prefix]

    def _routing_keys(self, writes: Sequence[StreamWrite]) -> list[str]:
        """Return the key by which a node of a Redis Cluster knows whether it has the slot of all these streams."""
        return [stream_key(self._prefix + writes[0].request_id)] if self._prefix else []

    def has_reply(self, timeout: float) -> bool:
        """Wait `timeout` seconds at most, and return whether `receive` would not wait for the reply."""
        return self._held.has_reply(timeout)

    def disconnect(self) -> None:
        """Give up a call that was sent: its entries may or may not be written."""
        self._held.close()

    def receive(self, writes: Sequence[StreamWrite], packed: bytes) -> dict[Attempt, WriteOutcome]:
        """Return what `publish` returns for these writes, which were sent. Redis's errors pass through."""
        failed = self._held.receive(self._publish, self._arguments(packed), self._routing_keys(writes))
        outcomes: dict[Attempt, WriteOutcome] = {}
        for position, outcome in zip(failed[::2], failed[1::2], strict=True):
            outcomes.setdefault(writes[position].key, WriteOutcome(outcome.decode()))
        return outcomes

    def exists(self, request_id: str) -> bool:
        """Return whether the request has a stream: it was begun or ended. Redis's errors pass through."""
        return bool(self._client.exists(stream_key(self._prefix + request_id)))

    def recorded(self, request_id: str) -> list[StreamEvent]:
        """Return all entries of the stream. Redis's errors pass through."""
        entries: Any = self._client.xrange(stream_key(self._prefix + request_id))
        return [read_entry(entry_id, fields) for entry_id, fields in entries]

    def keep(self, request_id: str) -> None:
        """Let the stream live until the next claim, while its request waits in the queue. Redis's errors pass through.

        Call it before the request returns to the queue: the next worker may claim it at once.
        """
        self._client.expire(stream_key(self._prefix + request_id), max(self._ttl_seconds, REQUEUED_SECONDS))

    def takes_writes(self) -> bool:
        """Return whether the server accepts writes now, tested with a key that belongs to no request."""
        key = shard_probe_key(self._prefix.removesuffix(":")) if self._prefix else PROBE_KEY
        try:
            return bool(self._client.set(key, "1", px=1))
        except REDIS_ERRORS:
            return False

    def mark_gone(self, request_id: str) -> None:
        """Mark the request as ended, so that nothing waits for its deleted stream. Redis's errors pass through."""
        self._client.set(ended_key(self._prefix + request_id), "1", ex=self._ttl_seconds + ENDED_SECONDS)

    def record_engine_losses(self, losses: Mapping[str, int]) -> None:
        """Store for each request how many engine processes died while they ran it, including those of other workers.

        Without this record, a request that kills engines would start with a count of zero at each worker. The call may
        be repeated. Redis's errors pass through.
        """
        with self._client.pipeline(transaction=False) as pipe:
            for request_id, count in losses.items():
                pipe.set(engine_losses_key(self._prefix + request_id), count, ex=ENGINE_LOSSES_SECONDS)
            pipe.execute()

    def forget_engine_losses(self, request_id: str) -> None:
        """Delete the count of a request that has proved not to kill engines. Redis's errors pass through."""
        self._client.delete(engine_losses_key(self._prefix + request_id))

    def end_unclaimed(
        self, request_id: str, finish_reason: str, error: ErrorInfo | None, content: str = "", lease: int = 0
    ) -> Ending:
        """End a stream that this worker did not claim, or no longer holds.

        `content` is the digest of the message that has ended. The stream of another message is left as it is. A key of
        another Redis type in the stream's place is replaced. `lease` is the number of the message's lease: the end
        comes after the entries of all earlier ones, even if they are lost.
        """
        data = end_data(finish_reason, None, error)
        data |= _of_message(content)
        args = (pack(data), self._ttl_seconds, self._ttl_seconds, content, lease)
        name = self._prefix + request_id
        found = self._end(*args, stream=stream_key(name), ended=ended_key(name))
        if found is None:
            return Ending.WRITTEN
        return Ending.HAD_ENDED if found else Ending.OF_ANOTHER_MESSAGE
