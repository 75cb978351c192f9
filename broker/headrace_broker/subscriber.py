"""The reading side of a request's stream: follow it, leave it, and come back at the last entry that was read."""

import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from headrace_broker.connections import BLOCK_SECONDS
from headrace_broker.errors import InvalidRequestError, ResultTimeoutError, StreamGoneError
from headrace_broker.events import EndEvent, StreamEvent, read_entry
from headrace_broker.keys import stream_key

if TYPE_CHECKING:
    import redis
    import redis.asyncio

BEGINNING: Final = "0-0"
_ENTRIES_AT_ONCE: Final = 1000
_ENTRY_ID: Final = re.compile(r"\d{1,20}-\d{1,20}", re.ASCII)


def read_stream(
    client: "redis.Redis", request_id: str, *, last_id: str = BEGINNING, timeout: float | None = None
) -> Iterator[StreamEvent]:
    """Yields the events after `last_id`, waits for more, and stops after the end event.

    A stream that does not exist yet is waited for. `client` comes from `connections.connect`. Raises
    ResultTimeoutError if no entry arrives for `timeout` seconds, StreamGoneError if the stream has vanished.
    """
    reader = _Reader(request_id, last_id, timeout)
    while not reader.ended:
        events = reader.received(client.xread(reader.streams, _ENTRIES_AT_ONCE, reader.block_ms()))
        if not events:
            reader.found_nothing(client.xrevrange(reader.key, count=1))
        yield from events


async def read_stream_async(
    client: "redis.asyncio.Redis", request_id: str, *, last_id: str = BEGINNING, timeout: float | None = None
) -> AsyncIterator[StreamEvent]:
    """`read_stream` for asyncio; `client` comes from `connections.connect_async`."""
    reader = _Reader(request_id, last_id, timeout)
    while not reader.ended:
        events = reader.received(await client.xread(reader.streams, _ENTRIES_AT_ONCE, reader.block_ms()))
        if not events:
            reader.found_nothing(await client.xrevrange(reader.key, count=1))
        for event in events:
            yield event


class _Reader:
    """Where a subscriber stands. It does no input or output, so both kinds of client share it."""

    def __init__(
        self, request_id: str, last_id: str, timeout: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not _ENTRY_ID.fullmatch(last_id):
            raise InvalidRequestError([f"last_id must be an entry id such as 1-17, not {last_id!r}"])
        self.key: Final = stream_key(request_id)
        self.ended = False
        self._request_id: Final = request_id
        self._last_id = last_id
        self._timeout: Final = timeout
        self._clock: Final = clock
        self._heard_at = clock()
        # Whoever resumes may find a stream that is over or gone: it looks once before it waits.
        self._may_block = last_id == BEGINNING

    @property
    def streams(self) -> dict[Any, Any]:
        return {self.key: self._last_id}

    def block_ms(self) -> int | None:
        """How long the next read may wait; None is not at all."""
        if not self._may_block:
            return None
        seconds = BLOCK_SECONDS
        if self._timeout is not None:
            seconds = min(seconds, self._heard_at + self._timeout - self._clock())
        return max(1, int(seconds * 1000))

    def received(self, reply: Any) -> list[StreamEvent]:
        """The events in the reply of an XREAD of this one stream."""
        self._may_block = True
        events = [read_entry(entry_id, fields) for _key, entries in reply for entry_id, fields in entries]
        if events:
            self._last_id = events[-1].entry_id
            self._heard_at = self._clock()
            self.ended = isinstance(events[-1], EndEvent)
        return events

    def found_nothing(self, newest: Any) -> None:
        """Takes the reply of an XREVRANGE for the newest entry, after a read that brought none."""
        if not newest and self._last_id != BEGINNING:
            raise StreamGoneError(self._request_id, self._last_id)
        if newest:
            event = read_entry(*newest[0])
            # it may also have arrived just now, and then the next read brings it
            self.ended = isinstance(event, EndEvent) and _not_after(event.entry_id, self._last_id)
        if not self.ended and self._timeout is not None and self._clock() - self._heard_at >= self._timeout:
            raise ResultTimeoutError(self._request_id, self._timeout, "stream entry")


def _not_after(entry_id: str, last_id: str) -> bool:
    entry, last = (tuple(map(int, name.split("-"))) for name in (entry_id, last_id))
    return entry <= last
