"""Follows streams by a `StreamHub`, for clients that read from several servers.

`follow` is for asyncio. `FollowingThread` runs a hub in a thread of its own, for clients of threads.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeVar

from headrace_broker.call_rules import check_timeout
from headrace_broker.errors import HeadraceBrokerError, ResultTimeoutError, StreamExpiredError
from headrace_broker.server.connections import BLOCK_SECONDS, connect_async
from headrace_broker.server.stream_servers import AsyncStreamServers
from headrace_broker.streams.events import StreamEvent
from headrace_broker.streams.hub import StreamHub, Subscription

T = TypeVar("T")
_CLOSED: Final = "the client was closed while a stream was read"
Event = tuple[str, StreamEvent | StreamExpiredError]


class _Timeout:
    """Limits how long a stream of a subscription has no entry."""

    def __init__(self, subscription: Subscription, timeout: float | None) -> None:
        check_timeout(timeout)
        self._subscription: Final = subscription
        self._timeout: Final = timeout

    def wait_seconds(self) -> float:
        """Return for how long to wait for events."""
        left = BLOCK_SECONDS if self._timeout is None else self._left(self._timeout)[0]
        return min(max(left, 0.0), BLOCK_SECONDS)

    def error(self) -> ResultTimeoutError | None:
        """Return the error of a stream that has had no entry for too long; None if there is none."""
        if self._timeout is None or not self._subscription.request_ids:
            return None
        left, request_id = self._left(self._timeout)
        return ResultTimeoutError(request_id, self._timeout, "stream entry") if left <= 0 else None

    def _left(self, timeout: float) -> tuple[float, str]:
        """Return the seconds that are left for the most silent stream, and its request id."""
        subscription = self._subscription
        request_id = min(subscription.request_ids, key=subscription.progressed_at.__getitem__)
        return subscription.progressed_at[request_id] + timeout - time.monotonic(), request_id


async def follow(hub: StreamHub, last_ids: Mapping[str, str | None], timeout: float | None) -> AsyncIterator[Event]:
    """Yield events as `subscriber.read_streams_async` does."""
    if not last_ids:
        return
    async with hub.subscribe(last_ids) as subscription:
        limit = _Timeout(subscription, timeout)
        while subscription.request_ids:
            events = await subscription.take(limit.wait_seconds())
            error = limit.error()
            for event in events:
                yield event
            if error is not None:
                raise error


class FollowingThread:
    """Runs a hub in an event loop of its own. Threads may share it. The thread starts with the first stream."""

    def __init__(self, redis_url: str, urls: Mapping[str, str], ttl_seconds: int) -> None:
        self._redis_url: Final = redis_url
        self._stream_servers: Final = urls, ttl_seconds
        self._lock: Final = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._hub: StreamHub
        self._is_stopped: asyncio.Event

    def follow(self, last_ids: Mapping[str, str | None], timeout: float | None) -> Iterator[Event]:
        """Yield events as `subscriber.read_streams` does."""
        if not last_ids:
            return
        self._start()
        opened: AbstractAsyncContextManager[Subscription] = self._hub.subscribe(last_ids)
        subscription = self._run(opened.__aenter__())
        try:
            limit = _Timeout(subscription, timeout)
            while subscription.request_ids:
                events = self._run(subscription.take(limit.wait_seconds()))
                error = limit.error()
                yield from events
                if error is not None:
                    raise error
        finally:
            self._schedule(opened.__aexit__(None, None, None))

    def close(self) -> None:
        """End the thread and close its connections. Does nothing if it was never started."""
        with self._lock:
            if self._loop is not None and self._thread is not None:
                self._loop.call_soon_threadsafe(self._is_stopped.set)
                self._thread.join()
            self._loop = self._thread = None

    def _schedule(self, work: Coroutine[Any, Any, T]) -> "Future[T] | None":
        """Run a coroutine on the thread; None if it has ended."""
        loop = self._loop
        if loop is None or loop.is_closed():
            work.close()
            return None
        return asyncio.run_coroutine_threadsafe(work, loop)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._schedule(work)
        if future is None:
            raise HeadraceBrokerError(_CLOSED)
        try:
            return future.result()
        except CancelledError:
            raise HeadraceBrokerError(_CLOSED) from None
        except BaseException:  # KeyboardInterrupt, too
            future.cancel()
            raise

    def _start(self) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # a forked process has no copy of the thread
                is_ready = threading.Event()
                self._thread = threading.Thread(
                    target=lambda: asyncio.run(self._serve(is_ready)), name="streams", daemon=True
                )
                self._thread.start()
                is_ready.wait()

    async def _serve(self, is_ready: threading.Event) -> None:
        try:
            main = connect_async(self._redis_url)
            servers = AsyncStreamServers.connected(main, *self._stream_servers)
            self._hub, self._is_stopped = StreamHub(servers), asyncio.Event()
            self._loop = asyncio.get_running_loop()
        finally:
            is_ready.set()
        await self._is_stopped.wait()
        await self._hub.aclose()
        await servers.aclose()
        await main.aclose()
