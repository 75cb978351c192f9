"""Reads many streams over one connection, for servers with many subscribers, which can come and go during a read.

With a reader for each stream, 64 streams take 64 reads for each step of the engine; the hub takes one.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Final

import redis.asyncio

from headrace_broker.call_rules import BEGINNING, check_last_ids
from headrace_broker.errors import HeadraceBrokerError, MalformedEntryError, StreamExpiredError, TooManySubscribersError
from headrace_broker.keys import HUB_SECONDS, hub_key
from headrace_broker.server.connections import CONNECTION_ERRORS, REDIS_ERRORS
from headrace_broker.streams.events import EndEvent, StreamEvent
from headrace_broker.streams.listeners import SHORTEST_SECONDS, heartbeat_interval, send_heartbeat
from headrace_broker.streams.subscriber import Readers, execute_async

_MAX_WAITING: Final = 512
"""Limit for the events that wait for one subscriber. At the limit, its streams are not read until it takes all."""
_RETRY_SECONDS: Final = 0.2
MAX_SUBSCRIBERS: Final = 16
"""Limit for the subscribers of one stream at a time: each beyond the first takes a connection."""


class Subscription:
    """The events of some streams that wait for one subscriber."""

    def __init__(self, hub: "StreamHub", last_ids: Mapping[str, str | None]) -> None:
        self._hub: Final = hub
        self._last_ids: Final = dict(last_ids)
        """The id of the last entry taken of each stream that has not ended."""
        self._events: list[tuple[str, StreamEvent | StreamExpiredError]] = []
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
            if not self._events and self._error is None:  # events may have arrived during `join`
                await self._wait(timeout)
        if self._error is not None:
            raise self._error
        taken, self._events = self._events, []
        for request_id, event in taken:
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

    def _end_wait(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def put(self, request_id: str, event: StreamEvent | StreamExpiredError) -> None:
        """Add an event. Called by the hub."""
        if self._is_paused:
            return  # the hub reads it again later
        self._events.append((request_id, event))
        self._end_wait()
        if len(self._events) >= _MAX_WAITING:
            self._is_paused = True
            self._hub.pause(self._last_ids)

    def fail(self, error: Exception) -> None:
        """End the subscription with an error. Called by the hub."""
        self._error = error
        self._end_wait()


class StreamHub:
    """Reads the streams of many subscriptions. It belongs to one event loop. Call `aclose` at the end.

    Args:
        client: from `connections.connect_async`.
        max_outage_seconds: seconds for which Redis may be unreachable before `take` raises.
    """

    def __init__(self, client: "redis.asyncio.Redis", *, max_outage_seconds: float = 30.0, subscriber: int = 1) -> None:
        self._client: Final = client
        self._number: Final = subscriber
        """1 if this hub serves the first subscriber of each stream, 2 if it serves the second, and so on."""
        self._max_outage: Final = max_outage_seconds
        self._key: Final = hub_key(uuid.uuid4().hex)
        self._readers: Final = Readers({}, None)
        self._readers.wake = (self._key, BEGINNING)
        self._subscriptions: Final[dict[str, Subscription]] = {}
        self._has_streams: Final = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._paused: Final[set[str]] = set()
        """Streams that are not read until their subscribers have taken the waiting events."""
        self._heartbeat_task: asyncio.Task[None] | None = None
        self._next: StreamHub | None = None
        """The hub for the next subscriber of a stream, because an XREAD can name a stream only once."""

    def __len__(self) -> int:
        """Return the number of streams that have subscribers."""
        return len(self._subscriptions) + (len(self._next) if self._next is not None else 0)

    async def aclose(self) -> None:
        """Stop reading. Waiting subscribers get no more events."""
        if self._next is not None:
            await self._next.aclose()
        for task in filter(None, (self._task, self._heartbeat_task)):
            while not task.done():  # a reply that arrives together with the cancellation can swallow it
                task.cancel()
                await asyncio.wait({task}, timeout=_RETRY_SECONDS)

    @asynccontextmanager
    async def subscribe(self, last_ids: Mapping[str, str | None]) -> AsyncIterator[Subscription]:
        """Subscribe to streams, each after an entry id, as `AsyncClient.events_many` does.

        Raises TooManySubscribersError.
        """
        last_ids = check_last_ids(last_ids)
        if any(request_id in self._subscriptions for request_id in last_ids):
            if self._number == MAX_SUBSCRIBERS:
                raise TooManySubscribersError(MAX_SUBSCRIBERS)
            if self._next is None:
                self._next = StreamHub(self._client, max_outage_seconds=self._max_outage, subscriber=self._number + 1)
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
            self.leave(last_ids)

    async def join(self, last_ids: Mapping[str, str | None]) -> None:
        """Start to read these streams."""
        for request_id, last_id in last_ids.items():
            self._paused.discard(request_id)
            self._readers.add(request_id, last_id)
        self._has_streams.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="stream hub")
        with contextlib.suppress(*CONNECTION_ERRORS):  # the reading task gets them too, and handles them
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.xadd(self._key, {"wake": 1}, maxlen=1)
                pipe.expire(self._key, HUB_SECONDS)
                await pipe.execute()

    def leave(self, last_ids: Mapping[str, str | None]) -> None:
        """Stop reading these streams."""
        for request_id in last_ids:
            self._readers.remove(request_id)
            self._paused.discard(request_id)

    def pause(self, last_ids: Mapping[str, str | None]) -> None:
        """Stop reading these streams for a while, but continue the heartbeats of their requests."""
        self.leave(last_ids)
        self._paused.update(last_ids)
        if self._heartbeat_task is None or self._heartbeat_task.done():
            self._heartbeat_task = asyncio.create_task(self._send_heartbeats(), name="stream hub heartbeats")

    async def _send_heartbeats(self) -> None:
        while self._paused:
            with contextlib.suppress(*REDIS_ERRORS):  # the reading task gets them too
                async with self._client.pipeline(transaction=False) as pipe:
                    for request_id in self._paused:
                        send_heartbeat(pipe, request_id)
                    await pipe.execute()
            await asyncio.sleep(heartbeat_interval(SHORTEST_SECONDS))

    async def _run(self) -> None:
        away_since: float | None = None
        while True:
            if not self._readers:
                self._has_streams.clear()
                await self._has_streams.wait()
            try:
                await self._read()
                away_since = None
            except MalformedEntryError as error:
                self._fail(error, self._subscriptions if error.request_id is None else [error.request_id])
            except (*REDIS_ERRORS, HeadraceBrokerError) as error:
                now = time.monotonic()
                away_since = now if away_since is None else away_since
                if isinstance(error, CONNECTION_ERRORS) and now - away_since < self._max_outage:
                    await asyncio.sleep(_RETRY_SECONDS)
                    continue
                away_since = None
                self._fail(error, self._subscriptions)

    def _fail(self, error: Exception, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._readers.remove(request_id)
            if request_id in self._subscriptions:
                self._subscriptions[request_id].fail(error)

    async def _read(self) -> None:
        replies = await execute_async(self._client, self._readers.commands())
        for reply in replies:
            for key, entries in reply or ():
                if key == self._key.encode():
                    self._readers.wake = (self._key, entries[-1][0].decode())
        for request_id, event in self._readers.received(replies):
            self._hand_over(request_id, event)
        if self._readers.needs_checks():
            async with self._client.pipeline(transaction=False) as pipe:
                self._readers.add_checks(pipe)
                answers = await pipe.execute()
            for request_id, expired in self._readers.checked(answers):
                self._hand_over(request_id, expired)

    def _hand_over(self, request_id: str, event: StreamEvent | StreamExpiredError) -> None:
        if (subscription := self._subscriptions.get(request_id)) is not None:
            subscription.put(request_id, event)
