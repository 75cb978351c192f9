"""The reading side of a request's stream. A subscriber can stop and resume after the last entry that it read."""

import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import redis
import redis.asyncio

from headrace_broker.call_rules import BEGINNING, check_last_id, check_timeout
from headrace_broker.errors import MalformedEntryError, ResultTimeoutError, StreamExpiredError
from headrace_broker.keys import ended_key, stream_key
from headrace_broker.server.connections import BLOCK_SECONDS
from headrace_broker.server.shards import key_prefix
from headrace_broker.server.stream_table import MAIN
from headrace_broker.streams.events import EndEvent, StartEvent, StreamEvent, read_entry, read_flat_entry
from headrace_broker.streams.listeners import get_abandon_after, heartbeat_interval, read_abandon_after, send_heartbeat
from headrace_broker.streams.seen_output import SeenOutput

_ENTRIES_AT_ONCE: Final = 1000
_CHECK_COMMANDS: Final = 3
"""Number of commands in each `_Reader.add_check`."""
_Command: TypeAlias = list[bytes | str | int]


def read_stream(
    client: "redis.Redis", request_id: str, *, last_id: str | None = BEGINNING, timeout: float | None = None
) -> Iterator[StreamEvent]:
    """Yield the events after `last_id`, wait for more, and stop after the end event.

    If the stream does not exist yet, this waits for it. `client` comes from `connections.connect`. Raises
    ResultTimeoutError if no entry arrives for `timeout` seconds, StreamExpiredError if the stream existed and no longer
    does.
    """
    for _request_id, event in read_streams(client, {request_id: last_id}, timeout=timeout):
        if isinstance(event, StreamExpiredError):
            raise event
        yield event


def read_streams(
    client: "redis.Redis", last_ids: Mapping[str, str | None], *, timeout: float | None = None
) -> Iterator[tuple[str, StreamEvent | StreamExpiredError]]:
    """Read many streams over one connection, as `read_stream` does; stop when the last one has ended.

    A stream that has expired yields its StreamExpiredError as its last item, and the others continue.
    """
    readers, seen = Readers(last_ids, timeout), {request_id: SeenOutput() for request_id in last_ids}
    while readers:
        for request_id, event in readers.received(_execute(client, readers.commands())):
            if (new := seen[request_id].new(event)) is not None:
                yield request_id, new
        if readers.needs_checks():
            with client.pipeline(transaction=False) as pipe:
                readers.add_checks(pipe)
                replies = pipe.execute()
            yield from readers.checked(replies)


async def read_stream_async(
    client: "redis.asyncio.Redis", request_id: str, *, last_id: str | None = BEGINNING, timeout: float | None = None
) -> AsyncIterator[StreamEvent]:
    """Yield events as `read_stream` does, for asyncio; `client` comes from `connections.connect_async`."""
    async for _request_id, event in read_streams_async(client, {request_id: last_id}, timeout=timeout):
        if isinstance(event, StreamExpiredError):
            raise event
        yield event


async def read_streams_async(
    client: "redis.asyncio.Redis", last_ids: Mapping[str, str | None], *, timeout: float | None = None
) -> AsyncIterator[tuple[str, StreamEvent | StreamExpiredError]]:
    """Yield events of many streams as `read_streams` does, for asyncio."""
    readers, seen = Readers(last_ids, timeout), {request_id: SeenOutput() for request_id in last_ids}
    while readers:
        for request_id, event in readers.received(await execute_async(client, readers.commands())):
            if (new := seen[request_id].new(event)) is not None:
                yield request_id, new
        if readers.needs_checks():
            async with client.pipeline(transaction=False) as pipe:
                readers.add_checks(pipe)
                replies = await pipe.execute()
            for expired in readers.checked(replies):
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
    """Several streams that one XREAD reads. True while any of them has not ended.

    Its events may repeat earlier ones after the server has lost writes: see `SeenOutput`.

    Heartbeats and checks are sent only when they are due. After each read, they would cost more than the read itself.
    """

    def __init__(self, last_ids: Mapping[str, str | None], timeout: float | None, home: str = MAIN) -> None:
        check_timeout(timeout)
        self._prefix: Final = key_prefix(home)
        readers = (_Reader(request_id, last_id, timeout, self._prefix) for request_id, last_id in last_ids.items())
        self._open: Final = {reader.key.encode(): reader for reader in readers}
        self._reading: dict[bytes, _Reader] = {}
        """The readers in the last `commands`. The replies are not for readers that were added later."""
        self.wake: tuple[str, str] | None = None
        """A stream and the id of its last entry read. A new entry ends a blocking read, but yields no event."""
        self._was_empty = self._has_waited = False
        self._checking: list[_Reader] = []
        self._heartbeats: list[_Reader] = []
        # Lower bounds of the readers' due times. Entries postpone the due times; only a start entry can advance them.
        self._read_due_at = self._check_due_at = -math.inf
        self._wakes_per_stream = False
        """Whether to send a second, non-blocking XREAD together with the blocking one. Redis before 7.2 answers a
        blocking read with only one stream, even if many get entries at once. If the last reads show this for two or
        more other streams, the second XREAD reads those, which saves both sides a wake-up."""
        self._was_single = False

    def __bool__(self) -> bool:
        return bool(self._open)

    def commands(self) -> list[_Command]:
        """Return the XREADs to send together. Names are bytes: for text, redis-py walks the replies twice more."""
        block_ms = self.block_ms()
        self._has_waited = block_ms is not None
        self._reading = dict(self._open)
        wake_key, wake_id = ([self.wake[0]], [self.wake[1]]) if self.wake else ([], [])
        last_ids = (reader.last_id for reader in self._open.values())
        streams: _Command = [b"STREAMS", *self._open, *wake_key, *last_ids, *wake_id]
        options: _Command = [b"XREAD", b"COUNT", _ENTRIES_AT_ONCE]
        if block_ms is None:
            return [options + streams]
        waiting = [*options, b"BLOCK", block_ms, *streams]
        return [waiting, options + streams] if self._wakes_per_stream and len(self._open) > 1 else [waiting]

    def add(self, request_id: str, last_id: str | None) -> None:
        """Add a stream to the next reads."""
        reader = _Reader(request_id, last_id, None, self._prefix)
        self._open[reader.key.encode()] = reader
        self._read_due_at = self._check_due_at = -math.inf

    def remove(self, request_id: str) -> None:
        """Stop reading this stream, if it is still read."""
        self._open.pop(stream_key(self._prefix + request_id).encode(), None)

    def block_ms(self) -> int | None:
        """Return the milliseconds for which the next read may block; None if it must not block."""
        now = time.monotonic()
        if self._read_due_at < now + BLOCK_SECONDS:
            self._read_due_at = min(reader.read_due_at for reader in self._open.values())
            self._check_due_at = min(reader.check_due_at for reader in self._open.values())
        if self._check_due_at == -math.inf:
            return None
        return max(1, int(min(BLOCK_SECONDS, self._read_due_at - now) * 1000))

    def received(self, replies: Sequence[Any]) -> Iterator[tuple[str, StreamEvent]]:
        """Yield the events in the replies to `commands`, and stop reading streams that have ended."""
        self._was_empty = not any(replies)
        counts = [len(reply or ()) for reply in replies]
        self._wakes_per_stream = counts[-1] > 1 and (counts[0] == 1 if len(counts) > 1 else self._was_single)
        self._was_single = counts == [1] and len(self._open) > 1
        seen: dict[bytes, int] = {}
        for reply in replies:
            for key, entries in reply or ():
                again = seen.get(key, 0)  # both commands read after the same entry, so the second repeats the first
                seen[key] = len(entries)
                if len(entries) > again and self._is_open(key, self._reading.get(key)):
                    yield from self._received(key, entries[again:])

    def _is_open(self, key: bytes, reader: "_Reader | None") -> bool:
        """Return whether this reader is in use. Another one, which begins at another entry, may have replaced it."""
        return reader is not None and self._open.get(key) is reader

    def _received(self, key: bytes, entries: Any) -> Iterator[tuple[str, StreamEvent]]:
        reader = self._open[key]
        for event in reader.received(entries):
            if isinstance(event, StartEvent):
                self._read_due_at = -math.inf
            yield reader.request_id, event
        if reader.ended and self._is_open(key, reader):
            del self._open[key]

    def needs_checks(self) -> bool:
        """Return whether `add_checks` has commands: checks of silent streams, or heartbeats."""
        now = time.monotonic()
        if not self._was_empty and now < self._read_due_at and now < self._check_due_at:
            return False
        readers = self._open.values()
        self._read_due_at = -math.inf  # the checks and heartbeats change the due times
        self._heartbeats = []
        if any(now >= reader.heartbeat_at for reader in readers):
            self._heartbeats = [reader for reader in readers if reader.is_heartbeat_near(now)]
        # a read that did not block, or that ended early for a heartbeat, does not show that the streams are silent
        all_silent = self._was_empty and self._has_waited and not self._heartbeats
        self._checking = [reader for reader in readers if all_silent or now >= reader.check_due_at]
        return bool(self._checking or self._heartbeats)

    def add_checks(self, pipe: Any) -> None:
        """Add the heartbeats and checks to a pipeline of either kind of client."""
        for reader in self._heartbeats:
            reader.send_heartbeat(pipe)
        for reader in self._checking:
            reader.add_check(pipe)

    def checked(self, replies: Sequence[Any]) -> Iterator[tuple[str, StreamExpiredError]]:
        """Read the replies of `add_checks` and yield the streams that have expired."""
        answers = replies[len(self._heartbeats) :]
        for position, reader in enumerate(self._checking):
            key = reader.key.encode()
            if not self._is_open(key, reader):
                continue
            expired = reader.checked(*answers[_CHECK_COMMANDS * position : _CHECK_COMMANDS * (position + 1)])
            if reader.ended:
                del self._open[key]
            if expired is not None:
                yield reader.request_id, expired


class _Reader:
    """A subscriber's position in one stream. It does no I/O, so both kinds of client share it."""

    def __init__(self, request_id: str, last_id: str | None, timeout: float | None, prefix: str) -> None:
        self._id_in_keys: Final = prefix + request_id
        self.key: Final = stream_key(self._id_in_keys)
        self.request_id: Final = request_id
        self.last_id = check_last_id(last_id)
        self.ended = False
        self._timeout: Final = timeout
        self._entry_at = self._checked_at = time.monotonic()
        self.abandon_after: float | None = None
        """The request is cancelled if it gets no heartbeat for this many seconds."""
        self.heartbeat_at = math.inf
        # A reader checks once before its first wait: the stream may have ended or expired, or need heartbeats.
        self._has_checked = False

    @property
    def read_due_at(self) -> float:
        """Monotonic time by which a read must return, for a heartbeat or because of the timeout."""
        return self.heartbeat_at if self._timeout is None else min(self.heartbeat_at, self._entry_at + self._timeout)

    @property
    def check_due_at(self) -> float:
        """Monotonic time of the next check, even if other streams of the same read get entries."""
        return max(self._entry_at, self._checked_at) + BLOCK_SECONDS if self._has_checked else -math.inf

    def received(self, entries: Any) -> list[StreamEvent]:
        """Return the events in an XREAD's reply for this stream."""
        with self._naming_request():
            events = [read_flat_entry(entry) for entry in entries]
        if events:
            self.last_id = events[-1].entry_id
            self._entry_at = time.monotonic()
            self.ended = isinstance(events[-1], EndEvent)
            if isinstance(events[0], StartEvent):  # it has all facts that a check would find
                self._has_checked = True
                self._set_abandon_after(events[0].abandon_after)
        return events

    @contextmanager
    def _naming_request(self) -> Iterator[None]:
        """Set the request id of a MalformedEntryError, which concerns this stream alone."""
        try:
            yield
        except MalformedEntryError as error:
            error.request_id = self.request_id
            raise

    def _set_abandon_after(self, abandon_after: float | None) -> None:
        if abandon_after != self.abandon_after:
            self.abandon_after = abandon_after
            self.heartbeat_at = math.inf if abandon_after is None else time.monotonic()

    def is_heartbeat_near(self, now: float) -> bool:
        """Return whether its next heartbeat can be sent together with those that are due now."""
        return self.abandon_after is not None and now >= self.heartbeat_at - heartbeat_interval(self.abandon_after) / 2

    def send_heartbeat(self, pipe: Any) -> None:
        """Add a heartbeat to a pipeline, if the request needs one."""
        if self.abandon_after is not None:
            self.heartbeat_at = time.monotonic() + heartbeat_interval(self.abandon_after)
            send_heartbeat(pipe, self._id_in_keys)

    def add_check(self, pipe: Any) -> None:
        """Add a check to a pipeline. The `ended` key is read first, because an ended request gets no new stream."""
        self._checked_at = time.monotonic()
        self._has_checked = True
        pipe.exists(ended_key(self._id_in_keys))
        pipe.xrevrange(self.key, count=1)
        get_abandon_after(pipe, self._id_in_keys)

    def checked(self, has_ended: int, newest: Any, listener: bytes | None) -> StreamExpiredError | None:
        """Read the replies of a check. Returns an error if the stream has expired."""
        if listener is not None:
            self._set_abandon_after(read_abandon_after(listener))
        if not newest and (has_ended or self.last_id != BEGINNING):
            self.ended = True
            return StreamExpiredError(self.request_id, self.last_id, has_ended=bool(has_ended))
        if newest:
            with self._naming_request():
                event = read_entry(*newest[0])
            # an end after `last_id` has arrived just now, and the next read returns it
            self.ended = isinstance(event, EndEvent) and _not_after(event.entry_id, self.last_id)
        if not self.ended and self._timeout is not None and time.monotonic() - self._entry_at >= self._timeout:
            raise ResultTimeoutError(self.request_id, self._timeout, "stream entry")
        return None


def _not_after(entry_id: str, last_id: str) -> bool:
    entry, last = (tuple(map(int, name.split("-"))) for name in (entry_id, last_id))
    return entry <= last
