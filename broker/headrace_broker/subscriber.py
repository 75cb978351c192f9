"""The reading side of a request's stream: follow it, leave it, and come back at the last entry that was read."""

import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from headrace_broker.call_rules import BEGINNING, check_last_id, check_timeout
from headrace_broker.connections import BLOCK_SECONDS
from headrace_broker.errors import MalformedEntryError, ResultTimeoutError, StreamExpiredError
from headrace_broker.events import EndEvent, StartEvent, StreamEvent, read_entry, read_flat_entry
from headrace_broker.keys import ended_key, stream_key
from headrace_broker.listeners import ask_abandon_after, read_abandon_after, touch, touch_every

if TYPE_CHECKING:
    import redis
    import redis.asyncio

_ENTRIES_AT_ONCE: Final = 1000
_QUESTIONS: Final = 3
"""So many commands are in each `_Reader.ask`."""
_Command: TypeAlias = list[bytes | str | int]


def read_stream(
    client: "redis.Redis", request_id: str, *, last_id: str | None = BEGINNING, timeout: float | None = None
) -> Iterator[StreamEvent]:
    """Yields the events after `last_id`, waits for more, and stops after the end event.

    A stream that does not exist yet is waited for. `client` comes from `connections.connect`. Raises
    ResultTimeoutError if no entry arrives for `timeout` seconds, StreamExpiredError if the stream existed and does not
    any more.
    """
    for _request_id, event in read_streams(client, {request_id: last_id}, timeout=timeout):
        if isinstance(event, StreamExpiredError):
            raise event
        yield event


def read_streams(
    client: "redis.Redis", last_ids: Mapping[str, str | None], *, timeout: float | None = None
) -> Iterator[tuple[str, StreamEvent | StreamExpiredError]]:
    """`read_stream` for many requests over one connection; stops when the last stream has ended.

    A stream that has expired ends with its StreamExpiredError, as an item, and the others go on.
    """
    readers = Readers(last_ids, timeout)
    while readers:
        yield from readers.received(_execute(client, readers.commands()))
        if readers.has_questions():
            with client.pipeline(transaction=False) as pipe:
                readers.ask(pipe)
                replies = pipe.execute()
            yield from readers.answered(replies)


async def read_stream_async(
    client: "redis.asyncio.Redis", request_id: str, *, last_id: str | None = BEGINNING, timeout: float | None = None
) -> AsyncIterator[StreamEvent]:
    """`read_stream` for asyncio; `client` comes from `connections.connect_async`."""
    async for _request_id, event in read_streams_async(client, {request_id: last_id}, timeout=timeout):
        if isinstance(event, StreamExpiredError):
            raise event
        yield event


async def read_streams_async(
    client: "redis.asyncio.Redis", last_ids: Mapping[str, str | None], *, timeout: float | None = None
) -> AsyncIterator[tuple[str, StreamEvent | StreamExpiredError]]:
    """`read_streams` for asyncio."""
    readers = Readers(last_ids, timeout)
    while readers:
        for event in readers.received(await execute_async(client, readers.commands())):
            yield event
        if readers.has_questions():
            async with client.pipeline(transaction=False) as pipe:
                readers.ask(pipe)
                replies = await pipe.execute()
            for expired in readers.answered(replies):
                yield expired


def _execute(client: "redis.Redis", commands: Sequence[_Command]) -> list[Any]:
    if len(commands) == 1:
        return [client.execute_command(*commands[0])]  # type: ignore[no-untyped-call]
    with client.pipeline(transaction=False) as pipe:
        for command in commands:
            pipe.execute_command(*command)  # type: ignore[no-untyped-call]
        return pipe.execute()


async def execute_async(client: "redis.asyncio.Redis", commands: Sequence[_Command]) -> list[Any]:
    if len(commands) == 1:
        return [await client.execute_command(*commands[0])]  # type: ignore[no-untyped-call]
    async with client.pipeline(transaction=False) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        return await pipe.execute()


class Readers:
    """Several streams that one XREAD reads. True while any of them goes on.

    Not every read asks every reader what it wants besides: with many of them that costs more than their entries.
    """

    def __init__(self, last_ids: Mapping[str, str | None], timeout: float | None) -> None:
        check_timeout(timeout)
        readers = (_Reader(request_id, last_id, timeout) for request_id, last_id in last_ids.items())
        self._open: Final = {reader.key.encode(): reader for reader in readers}
        self._asked: dict[bytes, _Reader] = {}
        """Those that the last `commands` read for: others may have joined since, and what comes is not theirs."""
        self.wake: tuple[str, str] | None = None
        """A stream, and its last entry read, that ends a wait but brings no events."""
        self._nothing_came = self._has_waited = False
        self._asking: list[_Reader] = []
        self._touching: list[_Reader] = []
        # No reader wants anything before these. What it hears puts that off; only a start may ask for touches at once.
        self._calls_by = self._looks_by = -math.inf
        self._wakes_for_one = False
        """Redis before 7.2 answers a read that waits with the first stream that gets something, though many get it at
        once. A second command, sent together with it, then reads the others, where these were two or more before: that
        saves both sides a wake-up."""
        self._came_alone = False

    def __bool__(self) -> bool:
        return bool(self._open)

    def commands(self) -> list[_Command]:
        """XREADs to send together. redis-py's own, or a name in text, looks through all that has come twice more."""
        block_ms = self.block_ms()
        self._has_waited = block_ms is not None
        self._asked = dict(self._open)
        wake_key, wake_id = ([self.wake[0]], [self.wake[1]]) if self.wake else ([], [])
        last_ids = (reader.last_id for reader in self._open.values())
        streams: _Command = [b"STREAMS", *self._open, *wake_key, *last_ids, *wake_id]
        options: _Command = [b"XREAD", b"COUNT", _ENTRIES_AT_ONCE]
        if block_ms is None:
            return [options + streams]
        waiting = [*options, b"BLOCK", block_ms, *streams]
        return [waiting, options + streams] if self._wakes_for_one and len(self._open) > 1 else [waiting]

    def add(self, request_id: str, last_id: str | None) -> None:
        """Read one more stream from now on."""
        reader = _Reader(request_id, last_id, None)
        self._open[reader.key.encode()] = reader
        self._calls_by = self._looks_by = -math.inf

    def remove(self, request_id: str) -> None:
        """Read this stream no more, if it is read still."""
        self._open.pop(stream_key(request_id).encode(), None)

    def block_ms(self) -> int | None:
        """How long the next read may wait; None is not at all."""
        now = time.monotonic()
        if self._calls_by < now + BLOCK_SECONDS:
            self._calls_by = min(reader.calls_by for reader in self._open.values())
            self._looks_by = min(reader.looks_by for reader in self._open.values())
        if self._looks_by == -math.inf:
            return None
        return max(1, int(min(BLOCK_SECONDS, self._calls_by - now) * 1000))

    def received(self, replies: Sequence[Any]) -> Iterator[tuple[str, StreamEvent]]:
        """The events in the replies to `commands`; streams that have ended are read no more."""
        self._nothing_came = not any(replies)
        counts = [len(reply or ()) for reply in replies]
        self._wakes_for_one = counts[-1] > 1 and (counts[0] == 1 if len(counts) > 1 else self._came_alone)
        self._came_alone = counts == [1] and len(self._open) > 1
        seen: dict[bytes, int] = {}
        for reply in replies:
            for key, entries in reply or ():
                again = seen.get(key, 0)  # both reads began behind the same entry, and none ever vanishes
                seen[key] = len(entries)
                if len(entries) > again and self._is_open(key, self._asked.get(key)):
                    yield from self._received(key, entries[again:])

    def _is_open(self, key: bytes, reader: "_Reader | None") -> bool:
        """Whether this very reader goes on: it may have been removed, and its stream be read anew from elsewhere."""
        return reader is not None and self._open.get(key) is reader

    def _received(self, key: bytes, entries: Any) -> Iterator[tuple[str, StreamEvent]]:
        reader = self._open[key]
        try:
            events = reader.received(entries)
        except MalformedEntryError as error:
            error.request_id = reader.request_id
            raise
        for event in events:
            if isinstance(event, StartEvent):
                self._calls_by = -math.inf
            yield reader.request_id, event
        if reader.ended and self._is_open(key, reader):
            del self._open[key]

    def has_questions(self) -> bool:
        """Whether `ask` has anything to ask, of streams that are silent, or to say, of those that want listeners."""
        now = time.monotonic()
        if not self._nothing_came and now < self._calls_by and now < self._looks_by:
            return False
        readers = self._open.values()
        self._calls_by = -math.inf  # what is asked and said now changes these times
        self._touching = []
        if any(reader.touch_is_due(now) for reader in readers):
            self._touching = [reader for reader in readers if reader.touch_is_near(now)]
        # a wait that ended because touches are due says little of silence, and a read that did not wait nothing
        all_silent = self._nothing_came and self._has_waited and not self._touching
        self._asking = [reader for reader in readers if all_silent or reader.wants_look()]
        return bool(self._asking or self._touching)

    def ask(self, pipe: Any) -> None:
        """Puts everything into a pipeline of either kind of client."""
        for reader in self._touching:
            reader.touch(pipe)
        for reader in self._asking:
            reader.ask(pipe)

    def answered(self, replies: Sequence[Any]) -> Iterator[tuple[str, StreamExpiredError]]:
        """What the pipeline brought: the streams that are no more."""
        answers = replies[len(self._touching) :]
        for position, reader in enumerate(self._asking):
            key = reader.key.encode()
            if not self._is_open(key, reader):
                continue
            expired = reader.found(*answers[_QUESTIONS * position : _QUESTIONS * (position + 1)])
            if reader.ended:
                del self._open[key]
            if expired is not None:
                yield reader.request_id, expired


class _Reader:
    """Where a subscriber stands. It does no input or output, so both kinds of client share it."""

    def __init__(self, request_id: str, last_id: str | None, timeout: float | None) -> None:
        self.key: Final = stream_key(request_id)
        self.request_id: Final = request_id
        self.last_id = check_last_id(last_id)
        self.ended = False
        self._timeout: Final = timeout
        self._heard_at = self._looked_at = time.monotonic()
        self.abandon_after: float | None = None
        """The request is cancelled unless it is touched within so many seconds again and again."""
        self._touch_at = math.inf
        # The stream may be over or gone, or want listeners: whoever comes looks once before it waits.
        self._has_looked = False

    @property
    def calls_by(self) -> float:
        """When a read must have come back, by the clock: to touch, or as nothing has come for too long."""
        return self._touch_at if self._timeout is None else min(self._touch_at, self._heard_at + self._timeout)

    @property
    def looks_by(self) -> float:
        """When it wants a look, whatever the other streams of the same read bring."""
        return max(self._heard_at, self._looked_at) + BLOCK_SECONDS if self._has_looked else -math.inf

    def received(self, entries: Any) -> list[StreamEvent]:
        """The events in what an XREAD brought of this stream."""
        events = [read_flat_entry(entry) for entry in entries]
        if events:
            self.last_id = events[-1].entry_id
            self._heard_at = time.monotonic()
            self.ended = isinstance(events[-1], EndEvent)
            if isinstance(events[0], StartEvent):  # which says all that a look would
                self._has_looked = True
                self._learn(events[0].abandon_after)
        return events

    def _learn(self, abandon_after: float | None) -> None:
        if abandon_after != self.abandon_after:
            self.abandon_after = abandon_after
            self._touch_at = math.inf if abandon_after is None else time.monotonic()

    def touch_is_due(self, now: float) -> bool:
        return now >= self._touch_at

    def touch_is_near(self, now: float) -> bool:
        """Whether it goes together with the touches that are due now."""
        return self.abandon_after is not None and now >= self._touch_at - touch_every(self.abandon_after) / 2

    def touch(self, pipe: Any) -> None:
        """Says that somebody listens."""
        if self.abandon_after is not None:
            self._touch_at = time.monotonic() + touch_every(self.abandon_after)
            touch(pipe, self.request_id)

    def wants_look(self) -> bool:
        """Never looked at, or silent for long while other streams of the same read were not."""
        return time.monotonic() >= self.looks_by

    def ask(self, pipe: Any) -> None:
        """First whether the request has ended: if it has, and then there is no stream, there will be none."""
        self._looked_at = time.monotonic()
        self._has_looked = True
        pipe.exists(ended_key(self.request_id))
        pipe.xrevrange(self.key, count=1)
        ask_abandon_after(pipe, self.request_id)

    def found(self, has_ended: int, newest: Any, listener: bytes | None) -> StreamExpiredError | None:
        """The answers, after a read that brought nothing. Returns an error where there is no stream any more."""
        if listener is not None:
            self._learn(read_abandon_after(listener))
        if not newest and (has_ended or self.last_id != BEGINNING):
            self.ended = True
            return StreamExpiredError(self.request_id, self.last_id)
        if newest:
            event = read_entry(*newest[0])
            # it may also have arrived just now, and then the next read brings it
            self.ended = isinstance(event, EndEvent) and _not_after(event.entry_id, self.last_id)
        if not self.ended and self._timeout is not None and time.monotonic() - self._heard_at >= self._timeout:
            raise ResultTimeoutError(self.request_id, self._timeout, "stream entry")
        return None


def _not_after(entry_id: str, last_id: str) -> bool:
    entry, last = (tuple(map(int, name.split("-"))) for name in (entry_id, last_id))
    return entry <= last
