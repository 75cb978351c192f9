"""Reads the streams of many subscribers, each from the server that has it.

`server_hub.py` reads those of one server.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import redis.asyncio

from headrace_broker.call_rules import check_last_ids
from headrace_broker.errors import HeadraceBrokerError, SettingsError, StreamExpiredError, TooManySubscribersError
from headrace_broker.server.connections import CONNECTION_ERRORS, REDIS_ERRORS
from headrace_broker.server.stream_servers import TABLE_SECONDS, AsyncStreamServers
from headrace_broker.server.stream_table import MAIN
from headrace_broker.streams.events import EndEvent, StreamEvent
from headrace_broker.streams.seen_output import SeenOutput
from headrace_broker.streams.server_hub import RETRY_SECONDS, ServerHub

_MAX_WAITING: Final = 512
"""Limit for the events that wait for one subscriber. At the limit, its streams are not read until it takes all."""
MAX_SUBSCRIBERS: Final = 16
"""Limit for the subscribers of one stream at a time: each beyond the first takes a connection."""


class Subscription:
    """The events of some streams that wait for one subscriber."""

    def __init__(self, hub: "StreamHub", last_ids: Mapping[str, str | None]) -> None:
        self._hub: Final = hub
        self._last_ids: Final = dict(last_ids)
        """The id of the last entry taken of each stream that has not ended."""
        self._seen: Final = {request_id: SeenOutput() for request_id in last_ids}
        self._events: list[tuple[str, StreamEvent | StreamExpiredError]] = []
        self.progressed_at: Final = dict.fromkeys(last_ids, time.monotonic())
        """By stream: monotonic time at which its latest entry arrived or was taken, or reading it began again."""
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        """Set while `take` waits; done when an event has arrived."""
        self._is_paused = False

    @property
    def request_ids(self) -> list[str]:
        """The streams that have not ended."""
        return list(self._last_ids)

    async def take(self, timeout: float | None) -> list[tuple[str, StreamEvent | StreamExpiredError]]:
        """Wait for events and return all that have arrived, as (request id, event); none after `timeout` seconds.

        The last event of a stream is its EndEvent, or a StreamExpiredError if it has expired. Raises redis-py's errors
        if Redis is unreachable for longer than the hub's `max_outage_seconds`.
        """
        if not self._events and self._error is None:
            if self._is_paused:
                self._is_paused = False
                await self._hub.join(self._last_ids)
                self.progressed_at.update(dict.fromkeys(self._last_ids, time.monotonic()))
            if not self._events and self._error is None:  # events may have arrived during `join`
                await self._wait(timeout)
        if self._error is not None:
            raise self._error
        taken, self._events = self._events, []
        now = time.monotonic()
        for request_id, event in taken:
            self.progressed_at[request_id] = now
            if isinstance(event, (EndEvent, StreamExpiredError)):
                self._last_ids.pop(request_id, None)
            else:
                self._last_ids[request_id] = event.entry_id
        return taken

    async def _wait(self, timeout: float | None) -> None:
        # An asyncio.timeout around an asyncio.Event takes three times as long, and there is a wait for each event.
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = None if timeout is None else loop.call_later(timeout, self._end_wait)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    @property
    def is_paused(self) -> bool:
        """Whether its streams are not read until it takes the events that wait."""
        return self._is_paused

    def _end_wait(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def put(self, request_id: str, event: StreamEvent | StreamExpiredError) -> None:
        """Add an event. Called by the hub."""
        if self._is_paused:
            return  # the hub reads it again later
        self.progressed_at[request_id] = time.monotonic()
        new = event if isinstance(event, StreamExpiredError) else self._seen[request_id].new(event)
        if new is None:
            return
        self._events.append((request_id, new))
        self._end_wait()
        if len(self._events) >= _MAX_WAITING:
            self._is_paused = True
            self._hub.pause(self._last_ids)

    def fail(self, error: Exception) -> None:
        """End the subscription with an error. Called by the hub."""
        self._error = error
        self._end_wait()


@dataclass(slots=True)
class _Place:
    """Where one stream is read."""

    homes: set[str] = field(default_factory=set)
    """The servers that are read now: only one after an entry has been found there."""
    tried: set[str] = field(default_factory=set)
    """All servers that were read."""
    losses: dict[str, float | None] = field(default_factory=dict)
    """By server: when it had lost its streams last, as the read began."""
    is_found: bool = False
    last_id: str | None = None
    """Where the subscriber began to read."""


class StreamHub:
    """Reads the streams of many subscriptions. It belongs to one event loop. Call `aclose` at the end.

    A stream is read at all servers that may have it, until one has an entry. Until then the table of the stream servers
    is read again each two seconds.

    Args:
        servers: the stream servers, or the client of the only one.
        max_outage_seconds: seconds for which a server may be unreachable before `take` raises.
    """

    def __init__(
        self,
        servers: "AsyncStreamServers | redis.asyncio.Redis",
        *,
        max_outage_seconds: float = 30.0,
        subscriber: int = 1,
    ) -> None:
        if isinstance(servers, redis.asyncio.Redis):
            servers = AsyncStreamServers(servers, {}, 0)
        self._servers: Final = servers
        self._number: Final = subscriber
        """1 if this hub serves the first subscriber of each stream, 2 if it serves the second, and so on."""
        self._max_outage: Final = max_outage_seconds
        self._hubs: Final[dict[str, ServerHub]] = {}
        """By name of the server."""
        self._subscriptions: Final[dict[str, Subscription]] = {}
        self._places: Final[dict[str, _Place]] = {}
        self._search: asyncio.Task[None] | None = None
        self._next: StreamHub | None = None
        """The hub for the next subscriber of a stream, because an XREAD can name a stream only once."""

    def __len__(self) -> int:
        """Return the number of streams that have subscribers."""
        return len(self._subscriptions) + (len(self._next) if self._next is not None else 0)

    async def aclose(self) -> None:
        """Stop reading. Waiting subscribers get no more events."""
        if self._next is not None:
            await self._next.aclose()
        while self._search is not None and not self._search.done():
            self._search.cancel()
            await asyncio.wait({self._search}, timeout=RETRY_SECONDS)
        for hub in self._hubs.values():
            await hub.aclose()

    @asynccontextmanager
    async def subscribe(self, last_ids: Mapping[str, str | None]) -> AsyncIterator[Subscription]:
        """Subscribe to streams, each after an entry id, as `AsyncClient.events_many` does.

        Raises TooManySubscribersError, and SettingsError if a stream server has no URL.
        """
        last_ids = check_last_ids(last_ids)
        if any(request_id in self._subscriptions for request_id in last_ids):
            if self._number == MAX_SUBSCRIBERS:
                raise TooManySubscribersError(MAX_SUBSCRIBERS)
            if self._next is None:
                outage = self._max_outage
                self._next = StreamHub(self._servers, max_outage_seconds=outage, subscriber=self._number + 1)
            async with self._next.subscribe(last_ids) as subscription:
                yield subscription
            return
        subscription = Subscription(self, last_ids)
        self._subscriptions.update(dict.fromkeys(last_ids, subscription))
        try:
            await self.join(last_ids)
            yield subscription
        finally:
            for request_id in last_ids:
                del self._subscriptions[request_id]
            self._leave(last_ids)

    async def join(self, last_ids: Mapping[str, str | None]) -> None:
        """Start to read these streams, or continue after `pause`."""
        with contextlib.suppress(*CONNECTION_ERRORS):  # then the table that was read last is used
            await self._servers.of_table()
        by_home: dict[str, dict[str, str | None]] = {}
        for request_id, last_id in last_ids.items():
            place = self._places.setdefault(request_id, _Place(last_id=last_id))
            if not place.homes:
                self._read_at(place, {*self._servers.checked_homes(request_id)})
            for home in place.homes:
                by_home.setdefault(home, {})[request_id] = last_id
        await self._join(by_home)
        is_searching = self._search is not None and not self._search.done()
        if not is_searching and any(not self._places[request_id].is_found for request_id in last_ids):
            self._search = asyncio.create_task(self._search_further(), name="stream hub search")

    async def _join(self, by_home: Mapping[str, Mapping[str, str | None]]) -> None:
        joins = [self._hub(home).join(last_ids) for home, last_ids in by_home.items()]
        if len(joins) == 1:
            await joins[0]
        else:
            await asyncio.gather(*joins)

    def _read_at(self, place: _Place, homes: set[str]) -> None:
        place.homes |= homes
        place.tried |= homes
        place.losses |= {home: self._servers.lost_at(home) for home in homes}

    def _hub(self, home: str) -> ServerHub:
        if home not in self._hubs:
            identify = partial(self._identify, home)
            self._hubs[home] = ServerHub(home, self._servers.client(home), self, identify, self._max_outage)
        return self._hubs[home]

    def _leave(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            place = self._places.pop(request_id, None)
            for home in place.homes if place is not None else ():
                self._hubs[home].leave([request_id])

    def pause(self, request_ids: Iterable[str]) -> None:
        """Stop reading these streams for a while, but continue the heartbeats of their requests."""
        for request_id in request_ids:
            for home in self._places[request_id].homes:
                self._hubs[home].pause([request_id])

    async def _search_further(self) -> None:
        """Read the table again, and look for the streams without an entry at further servers, until all are found."""
        while True:
            await asyncio.sleep(TABLE_SECONDS)
            sought = {request_id: place for request_id, place in self._places.items() if not place.is_found}
            if not sought:
                self._search = None
                return
            with contextlib.suppress(*REDIS_ERRORS):
                await self._servers.of_table()
            by_home: dict[str, dict[str, str | None]] = {}
            for request_id, place in sought.items():
                if self._places.get(request_id) is not place:
                    continue  # its subscriber has left meanwhile
                try:
                    new = {*self._servers.checked_homes(request_id)} - place.tried
                except SettingsError as error:
                    self._subscriptions[request_id].fail(error)
                    continue
                if self._subscriptions[request_id].is_paused:
                    continue
                self._read_at(place, new)
                for home in new:
                    by_home.setdefault(home, {})[request_id] = place.last_id
            if by_home:
                with contextlib.suppress(*REDIS_ERRORS, HeadraceBrokerError):
                    await self._join(by_home)

    async def _identify(self, home: str) -> None:
        await self.leave_if_lost(home)
        if not self._servers.is_lost(home):
            await self._servers.identify(home)

    # -- for the hubs of the servers ------------------------------------------------------------------------------

    async def leave_if_lost(self, home: str) -> None:
        """Read the streams of a server that has lost them at the servers that may have them now, from the beginning.

        The server itself may be used again by now.
        """
        if home == MAIN:  # it is never in the table
            return
        with contextlib.suppress(*REDIS_ERRORS):  # then the table that was read last is used
            await self._servers.of_table()
        is_lost, lost_at = self._servers.is_lost(home), self._servers.lost_at(home)
        for request_id, place in list(self._places.items()):
            if self._places.get(request_id) is not place:
                continue  # its subscriber has left meanwhile
            if home not in place.homes or not (is_lost or place.losses.get(home) != lost_at):
                continue
            self._hubs[home].leave([request_id])
            self._places[request_id] = _Place()
            subscription = self._subscriptions[request_id]
            try:
                if not subscription.is_paused:
                    await self.join({request_id: None})
            except SettingsError as error:
                subscription.fail(error)

    def put(self, home: str, request_id: str, event: StreamEvent | StreamExpiredError) -> None:
        """Hand an event to the subscriber of its stream."""
        place, subscription = self._places.get(request_id), self._subscriptions.get(request_id)
        if place is None or subscription is None or home not in place.homes:
            return
        if len(place.homes) > 1:
            if isinstance(event, StreamExpiredError) and not event.has_ended:
                place.homes.remove(home)  # another server may have it
                self._hubs[home].leave([request_id])
                return
            for other in place.homes - {home}:
                self._hubs[other].leave([request_id])
            place.homes.intersection_update([home])
        place.is_found = True
        subscription.put(request_id, event)

    def fail(self, home: str, request_id: str, error: Exception) -> None:
        """End the subscription of a stream that cannot be read."""
        place, subscription = self._places.get(request_id), self._subscriptions.get(request_id)
        if place is None or subscription is None or home not in place.homes:
            return
        if len(place.homes) > 1 and not isinstance(error, SettingsError):
            # another server may have it, and the search tries this one again
            place.homes.remove(home)
            place.tried.remove(home)
            self._hubs[home].leave([request_id])
            return
        subscription.fail(error)
