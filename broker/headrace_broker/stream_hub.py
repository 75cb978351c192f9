"""Follow many streams over one connection, joined and left at any time: for servers with many subscribers.

A reader of its own for each of 64 streams takes 64 reads a step of the engine; the hub takes one.
"""

import asyncio
import contextlib
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

from headrace_broker.call_rules import BEGINNING, check_request_id
from headrace_broker.connections import CONNECTION_ERRORS
from headrace_broker.errors import StreamExpiredError
from headrace_broker.events import EndEvent, StreamEvent
from headrace_broker.keys import hub_key
from headrace_broker.subscriber import Readers, execute_async, read_stream_async

if TYPE_CHECKING:
    import redis.asyncio

_MAX_WAITING: Final = 512
"""Events of one stream that wait for its subscriber; beyond it the stream is left in Redis until they are taken."""
_WAKE_KEY_SECONDS: Final = 3600
_RETRY_SECONDS: Final = 0.2


class _Subscription:
    """What one subscriber has yet to take."""

    def __init__(self) -> None:
        self.events: Final[deque[StreamEvent | Exception]] = deque()
        self.has_events: Final = asyncio.Event()
        self.is_paused = False

    def put(self, event: StreamEvent | Exception) -> None:
        self.events.append(event)
        self.has_events.set()


class StreamHub:
    """Belongs to one event loop. `aclose` it in the end.

    Args:
        client: from `connections.connect_async`.
        patience: seconds for which Redis may be away before subscribers are told.
    """

    def __init__(self, client: "redis.asyncio.Redis", *, patience: float = 30.0) -> None:
        self._client: Final = client
        self._patience: Final = patience
        self._key: Final = hub_key(uuid.uuid4().hex)
        self._readers: Final = Readers({}, None)
        self._readers.wake = (self._key, BEGINNING)
        self._subscriptions: Final[dict[str, _Subscription]] = {}
        self._has_streams: Final = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Streams that are followed now."""
        return len(self._subscriptions)

    async def aclose(self) -> None:
        """Stop reading; subscribers that still wait get nothing more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def events(self, request_id: str, *, last_id: str | None = BEGINNING) -> AsyncIterator[StreamEvent]:
        """Yield the events after `last_id` until the stream's end, as `AsyncClient.events` does.

        Raises StreamExpiredError where the stream is gone, and redis-py's errors where Redis is.
        """
        check_request_id(request_id)
        if request_id in self._subscriptions:  # an XREAD names a stream once
            async for event in read_stream_async(self._client, request_id, last_id=last_id):
                yield event
            return
        subscription = self._subscriptions[request_id] = _Subscription()
        try:
            await self._join(request_id, last_id)
            while True:
                if not subscription.events:
                    subscription.has_events.clear()
                    if subscription.is_paused:
                        subscription.is_paused = False
                        await self._join(request_id, last_id)
                    await subscription.has_events.wait()
                event = subscription.events.popleft()
                if isinstance(event, Exception):
                    raise event
                last_id = event.entry_id
                yield event
                if isinstance(event, EndEvent):
                    return
        finally:
            del self._subscriptions[request_id]
            self._readers.remove(request_id)

    async def _join(self, request_id: str, last_id: str | None) -> None:
        self._readers.add(request_id, last_id)
        self._has_streams.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="stream hub")
        with contextlib.suppress(*CONNECTION_ERRORS):  # the reading task meets them, too, and has patience
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.xadd(self._key, {"wake": 1}, maxlen=1)
                pipe.expire(self._key, _WAKE_KEY_SECONDS)
                await pipe.execute()

    async def _run(self) -> None:
        away_since: float | None = None
        while True:
            if not self._readers:
                self._has_streams.clear()
                await self._has_streams.wait()
            try:
                await self._read()
                away_since = None
            except Exception as error:  # the subscribers' answer, whatever it is
                now = time.monotonic()
                away_since = now if away_since is None else away_since
                if isinstance(error, CONNECTION_ERRORS) and now - away_since < self._patience:
                    await asyncio.sleep(_RETRY_SECONDS)
                    continue
                away_since = None
                for request_id, subscription in self._subscriptions.items():
                    self._readers.remove(request_id)
                    subscription.put(error)

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
        if subscription is None or subscription.is_paused:
            return  # what is not taken now is read again
        subscription.put(event)
        if len(subscription.events) >= _MAX_WAITING:
            subscription.is_paused = True
            self._readers.remove(request_id)
