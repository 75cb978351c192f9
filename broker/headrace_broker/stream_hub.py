"""Follow many streams over one connection, joined and left at any time: for servers with many subscribers.

A reader of its own for each of 64 streams takes 64 reads a step of the engine; the hub takes one.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from headrace_broker.call_rules import BEGINNING, check_last_ids
from headrace_broker.connections import CONNECTION_ERRORS, REDIS_ERRORS
from headrace_broker.errors import (
    HeadraceBrokerError,
    MalformedEntryError,
    StreamExpiredError,
    TooManySubscribersError,
)
from headrace_broker.events import EndEvent, StreamEvent
from headrace_broker.keys import HUB_SECONDS, hub_key
from headrace_broker.listeners import SHORTEST_SECONDS, touch, touch_every
from headrace_broker.subscriber import Readers, execute_async

if TYPE_CHECKING:
    import redis.asyncio

_MAX_WAITING: Final = 512
"""Events that wait for one subscriber; beyond it its streams are left in Redis until these are taken."""
_RETRY_SECONDS: Final = 0.2
MAX_SUBSCRIBERS: Final = 16
"""Of one stream at a time: each beyond the first takes a connection."""


class Subscription:
    """The events of some streams that one subscriber has yet to take."""

    def __init__(self, hub: "StreamHub", last_ids: Mapping[str, str | None]) -> None:
        self._hub: Final = hub
        self._last_ids: Final = dict(last_ids)
        """Of the streams that have not ended, behind the last event taken."""
        self._events: list[tuple[str, StreamEvent | StreamExpiredError]] = []
        self._error: Exception | None = None
        self._news: asyncio.Future[None] | None = None
        """Done when something has come, where `take` waits."""
        self._is_paused = False

    @property
    def request_ids(self) -> list[str]:
        """Streams that have not ended."""
        return list(self._last_ids)

    async def take(self, timeout: float | None) -> list[tuple[str, StreamEvent | StreamExpiredError]]:
        """Wait for events and return all that have come, (request id, event); none after `timeout` seconds.

        The last event of a stream is its EndEvent, or a StreamExpiredError where it is gone. Raises redis-py's errors
        where Redis is away for longer than the hub's patience.
        """
        if not self._events and self._error is None:
            if self._is_paused:
                self._is_paused = False
                await self._hub.join(self._last_ids)
            if not self._events and self._error is None:  # something may have come while it joined
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
        # An asyncio.timeout around an asyncio.Event takes three times as long, and there is a wait an event.
        loop = asyncio.get_running_loop()
        self._news = loop.create_future()
        timer = None if timeout is None else loop.call_later(timeout, self._end_wait)
        try:
            await self._news
        finally:
            self._news = None
            if timer is not None:
                timer.cancel()

    def _end_wait(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def put(self, request_id: str, event: StreamEvent | StreamExpiredError) -> None:
        """From the hub."""
        if self._is_paused:
            return  # it is read again
        self._events.append((request_id, event))
        self._end_wait()
        if len(self._events) >= _MAX_WAITING:
            self._is_paused = True
            self._hub.pause(self._last_ids)

    def fail(self, error: Exception) -> None:
        """From the hub: nothing more comes."""
        self._error = error
        self._end_wait()


class StreamHub:
    """Belongs to one event loop. `aclose` it in the end.

    Args:
        client: from `connections.connect_async`.
        patience: seconds for which Redis may be away before subscribers are told.
    """

    def __init__(self, client: "redis.asyncio.Redis", *, patience: float = 30.0, subscriber: int = 1) -> None:
        self._client: Final = client
        self._subscriber: Final = subscriber
        """Which of a stream's subscribers are here: the first, the second and so on."""
        self._patience: Final = patience
        self._key: Final = hub_key(uuid.uuid4().hex)
        self._readers: Final = Readers({}, None)
        self._readers.wake = (self._key, BEGINNING)
        self._subscriptions: Final[dict[str, Subscription]] = {}
        self._has_streams: Final = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._paused: Final[set[str]] = set()
        """Streams whose subscribers have not taken what has come."""
        self._touching: asyncio.Task[None] | None = None
        self._next: StreamHub | None = None
        """For the second subscriber of a stream: an XREAD names a stream once."""

    def __len__(self) -> int:
        """Streams that are followed now."""
        return len(self._subscriptions) + (len(self._next) if self._next is not None else 0)

    async def aclose(self) -> None:
        """Stop reading; subscribers that still wait get nothing more."""
        if self._next is not None:
            await self._next.aclose()
        for task in filter(None, (self._task, self._touching)):
            while not task.done():  # a reply that comes together with the cancellation can swallow it
                task.cancel()
                await asyncio.wait({task}, timeout=_RETRY_SECONDS)

    @asynccontextmanager
    async def subscribe(self, last_ids: Mapping[str, str | None]) -> AsyncIterator[Subscription]:
        """Follow streams, each from behind an entry, as `AsyncClient.events_many` does.

        Raises TooManySubscribersError.
        """
        last_ids = check_last_ids(last_ids)
        if any(request_id in self._subscriptions for request_id in last_ids):
            if self._subscriber == MAX_SUBSCRIBERS:
                raise TooManySubscribersError(MAX_SUBSCRIBERS)
            if self._next is None:
                self._next = StreamHub(self._client, patience=self._patience, subscriber=self._subscriber + 1)
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
        """Read these streams from now on."""
        for request_id, last_id in last_ids.items():
            self._paused.discard(request_id)
            self._readers.add(request_id, last_id)
        self._has_streams.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="stream hub")
        with contextlib.suppress(*CONNECTION_ERRORS):  # the reading task meets them, too, and has patience
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.xadd(self._key, {"wake": 1}, maxlen=1)
                pipe.expire(self._key, HUB_SECONDS)
                await pipe.execute()

    def leave(self, last_ids: Mapping[str, str | None]) -> None:
        """Read these streams no more."""
        for request_id in last_ids:
            self._readers.remove(request_id)
            self._paused.discard(request_id)

    def pause(self, last_ids: Mapping[str, str | None]) -> None:
        """Leave these streams in Redis for a while; their requests still have a listener."""
        self.leave(last_ids)
        self._paused.update(last_ids)
        if self._touching is None or self._touching.done():
            self._touching = asyncio.create_task(self._touch_paused(), name="stream hub's touches")

    async def _touch_paused(self) -> None:
        while self._paused:
            with contextlib.suppress(*REDIS_ERRORS):  # the reading task meets them, too
                async with self._client.pipeline(transaction=False) as pipe:
                    for request_id in self._paused:
                        touch(pipe, request_id)
                    await pipe.execute()
            await asyncio.sleep(touch_every(SHORTEST_SECONDS))

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
                if isinstance(error, CONNECTION_ERRORS) and now - away_since < self._patience:
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
        self._note_wake(replies)
        for request_id, event in self._readers.received(replies):
            self._hand_over(request_id, event)
        if self._readers.has_questions():
            async with self._client.pipeline(transaction=False) as pipe:
                self._readers.ask(pipe)
                answers = await pipe.execute()
            for request_id, expired in self._readers.answered(answers):
                self._hand_over(request_id, expired)

    def _note_wake(self, replies: list[Any]) -> None:
        for reply in replies:
            for key, entries in reply or ():
                if key == self._key.encode():
                    self._readers.wake = (self._key, entries[-1][0].decode())

    def _hand_over(self, request_id: str, event: StreamEvent | StreamExpiredError) -> None:
        subscription = self._subscriptions.get(request_id)
        if subscription is not None:
            subscription.put(request_id, event)
