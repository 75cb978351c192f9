"""`ServerHub`: reads many streams of one home over one connection, which can come and go during a read.

With a reader for each stream, 64 streams take 64 reads for each step of the engine; the hub takes one.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, Protocol

import redis.asyncio

from headrace_broker.call_rules import BEGINNING
from headrace_broker.errors import HeadraceBrokerError, MalformedEntryError, StreamExpiredError
from headrace_broker.keys import HUB_SECONDS, hub_key
from headrace_broker.server.connections import CONNECTION_ERRORS, REDIS_ERRORS
from headrace_broker.server.shards import id_in_keys, key_prefix
from headrace_broker.streams.events import StreamEvent
from headrace_broker.streams.listeners import SHORTEST_SECONDS, heartbeat_interval, send_heartbeat
from headrace_broker.streams.subscriber import Readers, execute_async

RETRY_SECONDS: Final = 0.2


class Receiver(Protocol):
    """Gets what a hub reads. `home` is the name of the hub's server."""

    def put(self, home: str, request_id: str, event: StreamEvent | StreamExpiredError) -> None: ...

    def fail(self, home: str, request_id: str, error: Exception) -> None: ...

    async def leave_if_lost(self, home: str) -> None:
        """Stop reading the streams of a home that has lost them."""


class ServerHub:
    """It belongs to one event loop. Call `aclose` at the end.

    Args:
        home: the name of the server, or a shard of a Redis Cluster.
        client: from `connections.connect_async`, or the client of the shard.
        identify: checks that the server is the right one, before the first read and after each lost connection.
        max_outage_seconds: seconds for which the server may be unreachable before its streams fail.
    """

    def __init__(
        self,
        home: str,
        client: "redis.asyncio.Redis",
        receiver: Receiver,
        identify: Callable[[], Awaitable[Any]],
        max_outage_seconds: float,
    ) -> None:
        self._home: Final = home
        self._client: Final = client
        self._receiver: Final = receiver
        self._identify: Final = identify
        self._is_identified = False
        self._max_outage: Final = max_outage_seconds
        self._key: Final = hub_key(key_prefix(home) + uuid.uuid4().hex)
        self._readers: Final = Readers({}, None, home)
        self._readers.wake = (self._key, BEGINNING)
        self._joined: Final[set[str]] = set()
        """The streams that are read or paused."""
        self._has_streams: Final = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._wake_task: asyncio.Task[None] | None = None
        self._has_wake_waiting = False
        """Whether the wake task still waits to send."""
        self._paused: Final[set[str]] = set()
        """Streams that are not read until their subscribers have taken the waiting events."""
        self._heartbeat_task: asyncio.Task[None] | None = None

    async def aclose(self) -> None:
        """Stop reading."""
        for task in filter(None, (self._task, self._wake_task, self._heartbeat_task)):
            while not task.done():  # a reply that arrives together with the cancellation can swallow it
                task.cancel()
                await asyncio.wait({task}, timeout=RETRY_SECONDS)

    async def join(self, last_ids: Mapping[str, str | None]) -> None:
        """Start to read these streams."""
        for request_id, last_id in last_ids.items():
            self._joined.add(request_id)
            self._paused.discard(request_id)
            self._readers.add(request_id, last_id)
        self._has_streams.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="stream hub")
        if not self._has_wake_waiting:
            self._has_wake_waiting = True
            self._wake_task = asyncio.create_task(self._end_read(self._wake_task), name="stream hub wake")
            self._wake_task.add_done_callback(lambda task: task.cancelled() or task.exception())  # all may have left
        task = self._wake_task
        assert task is not None
        await asyncio.wait({task})  # continues for the others if this join is cancelled
        if not task.cancelled():
            task.result()

    async def _end_read(self, before: asyncio.Task[None] | None) -> None:
        """Send a wake after the one `before` it. It ends the running read, and the next read has the new streams.

        Streams that join meanwhile share this wake. With one of its own, each would need a connection.
        """
        if before is not None:
            await asyncio.gather(before, return_exceptions=True)  # is cancelled together with this task
        self._has_wake_waiting = False
        with contextlib.suppress(*CONNECTION_ERRORS):  # the reading task gets them too, and handles them
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.xadd(self._key, {"wake": 1}, maxlen=1)
                pipe.expire(self._key, HUB_SECONDS)
                await pipe.execute()

    def leave(self, request_ids: Iterable[str]) -> None:
        """Stop reading these streams."""
        for request_id in request_ids:
            self._readers.remove(request_id)
            self._paused.discard(request_id)
            self._joined.discard(request_id)

    def pause(self, request_ids: Iterable[str]) -> None:
        """Stop reading these streams for a while, but continue the heartbeats of their requests."""
        for request_id in request_ids:
            self._readers.remove(request_id)
            self._paused.add(request_id)
        if self._heartbeat_task is None or self._heartbeat_task.done():
            self._heartbeat_task = asyncio.create_task(self._send_heartbeats(), name="stream hub heartbeats")

    async def _send_heartbeats(self) -> None:
        while self._paused:
            with contextlib.suppress(*REDIS_ERRORS):  # the reading task gets them too
                async with self._client.pipeline(transaction=False) as pipe:
                    for request_id in self._paused:
                        send_heartbeat(pipe, id_in_keys(self._home, request_id))
                    await pipe.execute()
            await asyncio.sleep(heartbeat_interval(SHORTEST_SECONDS))

    async def _run(self) -> None:
        away_since: float | None = None
        while True:
            if not self._readers:
                self._has_streams.clear()
                await self._has_streams.wait()
            try:
                if not self._is_identified:
                    await self._identify()
                    self._is_identified = True
                    continue  # its streams may have left meanwhile
                await self._read()
                away_since = None
            except MalformedEntryError as error:
                self._fail(error, self._joined if error.request_id is None else [error.request_id])
            except (*REDIS_ERRORS, HeadraceBrokerError) as error:
                self._is_identified = False
                now = time.monotonic()
                away_since = now if away_since is None else away_since
                if isinstance(error, CONNECTION_ERRORS) and now - away_since < self._max_outage:
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                away_since = None
                self._fail(error, self._joined)

    def _fail(self, error: Exception, request_ids: Iterable[str]) -> None:
        for request_id in list(request_ids):
            self._readers.remove(request_id)
            self._receiver.fail(self._home, request_id, error)

    async def _read(self) -> None:
        replies = await execute_async(self._client, self._readers.commands())
        for reply in replies:
            for key, entries in reply or ():
                if key == self._key.encode():
                    self._readers.wake = (self._key, entries[-1][0].decode())
        for request_id, event in self._readers.received(replies):
            self._receiver.put(self._home, request_id, event)
        if self._readers.needs_checks():
            await self._receiver.leave_if_lost(self._home)
            async with self._client.pipeline(transaction=False) as pipe:
                self._readers.add_checks(pipe)
                answers = await pipe.execute()
            for request_id, expired in self._readers.checked(answers):
                self._receiver.put(self._home, request_id, expired)
