"""The writing side of a request's stream: claim, publish, end. The reading side is in `subscriber.py`.

Redis accepts an entry only if its ID is above the stream's last, and the ID is `<attempt>-<tokens after this entry>`.
So it rejects by itself every duplicate and everything that a fenced worker still sends, whether that worker is behind
its successor or ahead of it.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias

import msgpack

from headrace_broker.connections import REDIS_ERRORS
from headrace_broker.events import ChunkEvent, EndEvent, StartEvent, StreamEvent, pack, read_entry, read_flat_entry
from headrace_broker.held_connection import HeldConnection
from headrace_broker.keys import (
    ENDED_SECONDS,
    HANDED_BACK_SECONDS,
    PROBE_KEY,
    ended_key,
    engine_losses_key,
    stream_key,
)
from headrace_broker.model_identity import ModelIdentity
from headrace_broker.results import ErrorInfo, PromptLogprobs, TokenLogprobs, Usage, logprob_bytes_to_wire
from headrace_broker.scripts import script

if TYPE_CHECKING:
    import redis

END_STREAM: Final = script("stream_prelude", "stream_end")
_CLAIM: Final = script("stream_prelude", "stream_claim")
_PUBLISH: Final = script("stream_prelude", "stream_publish")

_ENDED: Final = 1
_ANOTHERS: Final = 2
"""States of a claim, as `stream_claim.lua` says them."""

Attempt: TypeAlias = tuple[str, int]
"""A request's id and the number of one attempt at it: the same worker may make more than one."""


class WriteOutcome(StrEnum):
    """Why a write was not accepted. In each case the writer must stop generating and write no more."""

    FENCED = "fenced"  # another worker has taken the request over, or has ended it
    CANCELLED = "cancelled"  # a client ended it
    GONE = "gone"  # the stream has expired or was deleted
    ROLLED_BACK = "rolled_back"
    """The server lost entries that it had accepted. This one would leave a gap; or the claim was lost, another worker
    has made it, too, and has written these tokens under the same attempt."""


class Ending(StrEnum):
    """What became of an end that was to be written to a stream from outside."""

    WRITTEN = "written"
    HAD_ENDED = "had ended"
    ANOTHERS = "another's"
    """The stream is that of another message with the same request id, and was left alone."""


@dataclass(slots=True)  # not frozen: that takes 1 us more, and there is one of them a chunk
class StreamWrite:
    """One entry to publish; `chunk` and `end` build it with the right id and data. Never changed afterwards."""

    request_id: str
    attempt: int
    entry_id: str
    entry_before: str
    """The entry behind which this one belongs, or an id of as many tokens where it is an earlier attempt's."""
    type: Literal["chunk", "end"]
    data: bytes = field(repr=False)
    """Packed at once: bytes are nothing for the garbage collector to walk."""

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
    ) -> Self:
        """`offset` counts the tokens of all choices and attempts up to and including these.

        Within an attempt every chunk needs an offset of its own: text without a token goes with the next token, or
        with the choice's last chunk.
        """
        data: dict[str, Any] = {"index": index, "token_ids": token_ids, "text": text, "logprobs": logprobs}
        if logprobs is not None:
            data |= logprob_bytes_to_wire("logprob_bytes", logprobs)
        if prompt_logprobs is not None:
            data["prompt_logprobs"] = prompt_logprobs
            data |= logprob_bytes_to_wire("prompt_logprob_bytes", prompt_logprobs)
        if finish_reason is not None:
            data |= {"finish_reason": finish_reason, "stop_reason": stop_reason}
        before = f"{attempt}-{offset - len(token_ids)}"
        return cls(request_id, attempt, f"{attempt}-{offset}", before, "chunk", pack(data))

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
    ) -> Self:
        """`tokens` counts those of all choices and attempts; the attempt must write nothing after it."""
        data = pack(end_data(finish_reason, usage, error))
        return cls(request_id, attempt, f"{attempt}-{tokens + 1}", f"{attempt}-{tokens}", "end", data)


def pack_writes(writes: Iterable[StreamWrite]) -> bytes:
    """As `StreamWriter.publish` sends them; `unpack_writes` makes the same of it again."""
    entries = [(write.request_id, write.entry_id, write.entry_before, write.type, write.data) for write in writes]
    # By a packer of its own, as a thread's keeps the room that it once needed: after an outage, that of all tokens.
    packed: bytes = msgpack.packb(entries, use_bin_type=False)
    return packed


def unpack_writes(packed: bytes, request_ids: Collection[str]) -> list[StreamWrite]:
    """Those of these requests alone, as there may be very many others."""
    wanted = {request_id.encode() for request_id in request_ids}
    entries = (entry for entry in msgpack.unpackb(packed, raw=True) if entry[0] in wanted)
    texts = (([part.decode() for part in entry[:4]], entry[4]) for entry in entries)
    return [
        StreamWrite(request_id, int(entry_id.partition("-")[0]), entry_id, before, kind, data)
        for (request_id, entry_id, before, kind), data in texts
    ]


def end_data(finish_reason: str, usage: Usage | None, error: ErrorInfo | None) -> dict[str, Any]:
    """The data of an end entry."""
    return {
        "finish_reason": finish_reason,
        "usage": usage.to_wire() if usage else None,
        "error": error.to_wire() if error else None,
    }


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write to a stream as `attempt`, and everything that earlier attempts wrote.

    Nothing was claimed and nothing may be written where `ended` is set, as the request was already over, and where
    `is_anothers` is, as the stream is that of another message with the same request id.
    """

    attempt: int
    entries: list[StreamEvent] = field(repr=False)
    ended: EndEvent | None
    engine_losses: int = 0
    """How many engine processes, of any worker, died with this request in them; see `engine_losses.py`."""
    is_anothers: bool = False
    has_replaced: bool = False
    """The stream had ids behind which nothing can come, which no worker writes: it was deleted and begun anew."""


def begun_with(entries: Iterable[StreamEvent], model: ModelIdentity) -> ModelIdentity | None:
    """The weights that computed tokens among these entries and are not this model's; None where there are none."""
    current: ModelIdentity | None = None
    for entry in entries:
        if isinstance(entry, StartEvent):
            current = entry.model
        elif isinstance(entry, ChunkEvent) and entry.token_ids and current is not None and current.differs_from(model):
            return current
    return None


def draws_of(entries: Iterable[StreamEvent]) -> set[str]:
    """The names of the draws behind the tokens among these entries, as far as their workers said."""
    names: set[str] = set()
    current: str | None = None
    for entry in entries:
        if isinstance(entry, StartEvent):
            current = entry.draws
        elif isinstance(entry, ChunkEvent) and entry.token_ids and current is not None:
            names.add(current)
    return names


class StreamWriter:
    """Writes the streams of a worker's requests.

    `client` must return bytes (`connections.connect`); one thread publishes. Every method may be repeated when its
    reply was lost, except that a repeated claim counts as one more attempt. Redis's errors pass through.
    """

    def __init__(self, client: "redis.Redis", ttl_seconds: int) -> None:
        self._client: Final = client
        self._ttl_seconds: Final = ttl_seconds
        self._claim: Final = client.register_script(_CLAIM.text)
        self._publish: Final = client.register_script(_PUBLISH.text)
        self._held: Final = HeldConnection(client)
        self._end: Final = client.register_script(END_STREAM.text)

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
    ) -> Claim:
        """Takes the request over from whoever had it. A stream that has ended is left as it is.

        `content` is the digest of the message that asks. A stream that was begun by a message of other content is left
        as it is, too.
        """
        start: dict[str, Any] = {"worker": worker_name}
        if content is not None:
            start["content"] = content
        if traceparent is not None:
            start["traceparent"] = traceparent
        if abandon_after is not None:
            start["abandon_after"] = abandon_after
        if model is not None:
            start |= model.to_wire()
        if prompt_tokens is not None:
            start["prompt_tokens"] = prompt_tokens
        if prompt_tail is not None:
            start["prompt_tail"] = prompt_tail
        if draws is not None:
            start["draws"] = draws
        keys = _CLAIM.keys(
            stream=stream_key(request_id), engine_losses=engine_losses_key(request_id), ended=ended_key(request_id)
        )
        args: list[str | int | bytes] = [pack(start), self._ttl_seconds, content or ""]
        attempt, state, raw, losses, replaced = self._claim(keys=keys, args=args)
        entries = [read_flat_entry(entry) for entry in raw]
        last = entries[-1] if state == _ENDED else None
        ended = last if isinstance(last, EndEvent) else None
        return Claim(attempt, entries, ended, losses, state == _ANOTHERS, bool(replaced))

    def publish(self, writes: Iterable[StreamWrite], packed: bytes | None = None) -> dict[Attempt, WriteOutcome]:
        """Appends all entries in one round trip and returns the attempts of which one was not accepted.

        A stream lives `ttl_seconds` from its latest entry on. If the reply was lost, publish the very same writes
        again before any newer ones: what Redis has already is then ignored. Merged into other writes it would not be
        recognised. Where an attempt was ROLLED_BACK, publish all of its latest writes again, from before the gap on.

        `packed` is what `pack_writes` makes of the writes, where the caller needs it, too.
        """
        writes = list(writes)
        if not writes:
            return {}
        packed = packed or pack_writes(writes)
        # In one argument, and no KEYS: each argument of its own costs redis-py more than Redis takes to unpack all.
        failed = self._held.run(self._publish, [self._ttl_seconds, packed])
        outcomes: dict[Attempt, WriteOutcome] = {}
        for position, outcome in zip(failed[::2], failed[1::2], strict=True):
            outcomes.setdefault(writes[position].key, WriteOutcome(outcome.decode()))
        return outcomes

    def exists(self, request_id: str) -> bool:
        """Whether somebody has begun the request, or ended it. Redis's errors pass through."""
        return bool(self._client.exists(stream_key(request_id)))

    def recorded(self, request_id: str) -> list[StreamEvent]:
        """All that the stream holds. Redis's errors pass through."""
        entries: Any = self._client.xrange(stream_key(request_id))
        return [read_entry(entry_id, fields) for entry_id, fields in entries]

    def keep(self, request_id: str) -> None:
        """Let the stream live while its request waits in the queue, until the next claim. Redis's errors pass through.

        Before the request is handed back, as its next worker may be quick.
        """
        self._client.expire(stream_key(request_id), max(self._ttl_seconds, HANDED_BACK_SECONDS))

    def takes_writes(self) -> bool:
        """Whether the server takes a write now, whatever it says of a request's own keys."""
        try:
            return bool(self._client.set(PROBE_KEY, "1", px=1))
        except REDIS_ERRORS:
            return False

    def mark_gone(self, request_id: str) -> None:
        """Tell who comes late to a stream that was deleted that there will be none. Redis's errors pass through."""
        self._client.set(ended_key(request_id), "1", ex=self._ttl_seconds + ENDED_SECONDS)

    def end_unclaimed(self, request_id: str, finish_reason: str, error: ErrorInfo | None, content: str = "") -> Ending:
        """Ends a stream that this worker never claimed, or that is no longer its own.

        `content` is the digest of the message that is over: only its own stream is ended. A key of another type in the
        stream's place is replaced.
        """
        data = end_data(finish_reason, None, error)
        if content:
            data["content"] = content
        keys = END_STREAM.keys(stream=stream_key(request_id), ended=ended_key(request_id))
        args: list[str | int | bytes] = [pack(data), self._ttl_seconds, self._ttl_seconds, content]
        found = self._end(keys=keys, args=args)
        if found is None:
            return Ending.WRITTEN
        return Ending.HAD_ENDED if found else Ending.ANOTHERS
