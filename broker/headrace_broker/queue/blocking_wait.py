"""Blocking waits for many lists at once inside kombu's event loop. One message wakes one worker.

A queue is one list for each priority step. Redis's BLMOVE waits for a message and moves it to another list, in which it
stays if the woken worker dies. BLMOVE waits for one list. So each list has a connection of its own, and an idle worker
sleeps until Redis answers one of them.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import redis
from kombu.transport.redis import MultiChannelPoller

from headrace_broker.keys import arrived_key, holder_wake_up_key, wake_up_key
from headrace_broker.server.connections import connect
from headrace_broker.server.queue_servers import OTHER_TIMEOUT

WAIT_SECONDS: Final = 10.0
"""How long one wait lasts if no message arrives. A server that has not answered some seconds later is gone."""

_OVERDUE_SECONDS: Final = WAIT_SECONDS + 5.0
_CHECK_SECONDS: Final = 1.0


def wait_command(list_name: str) -> tuple[Any, ...]:
    """Return the command that waits until the list has a message, and moves it to the list's `arrived` list."""
    return ("BLMOVE", list_name, arrived_key(list_name), "RIGHT", "LEFT", WAIT_SECONDS)


def wake_up_command(queue: str) -> tuple[Any, ...]:
    """Return the command that waits for the wake-up token of the queue, and takes it."""
    return ("BLPOP", wake_up_key(queue), WAIT_SECONDS)


def holder_wake_up_command(queue: str, worker: str) -> tuple[Any, ...]:
    """Return the command that waits for the worker's own wake-up token of the queue, and takes it."""
    return ("BLPOP", holder_wake_up_key(queue, worker), WAIT_SECONDS)


class WaitingChannel(Protocol):
    """The attributes of kombu's channel that a wait uses."""

    connection_errors: tuple[type[Exception], ...]
    _registered: bool

    def _on_connection_disconnect(self, connection: Any) -> None: ...


def waiting_pool(channel: WaitingChannel, url: str) -> "redis.ConnectionPool":
    """Return a pool of connections that wait at another server than the channel's. Its owner disconnects it."""
    pool = connect(url, timeout=OTHER_TIMEOUT).connection_pool
    kind: Any = pool.connection_class

    def disconnect(self: Any, *args: Any, **options: Any) -> None:
        kind.disconnect(self, *args, **options)
        if channel._registered:  # as in kombu's own connections
            channel._on_connection_disconnect(self)

    pool.connection_class = type("WaitingConnection", (kind,), {"disconnect": disconnect})
    return pool


class BlockingWait:
    """Waits for one list of a channel. kombu's poller requires the attribute `connection`.

    Args:
        pool: the pool of the connections that wait for this queue.
        queue: the queue for whose messages it waits.
        command: waits until the list has an element.
    """

    def __init__(self, channel: WaitingChannel, pool: Any, queue: str, command: tuple[Any, ...]) -> None:
        self.queue: Final = queue
        self.command: Final = command
        self._channel: Final = channel
        self.connection: Final = pool.get_connection()
        self._started_at: float | None = None

    def start(self, poller: "WaitPoller") -> None:
        """Start to wait, unless the wait is running. Redis's errors pass through."""
        if self._started_at is not None:
            if time.monotonic() - self._started_at < _OVERDUE_SECONDS:
                return
            self.connection.disconnect()
        key = (self._channel, self, self)
        if self.connection._sock is None or key not in poller._chan_to_sock:
            poller._register(*key)
        self._started_at = None
        # A health check would wait for its reply here, on a connection that may be half open.
        self.connection.send_command(*self.command, check_health=False)
        self._started_at = time.monotonic()

    def read_reply(self) -> bool:
        """Read the reply of a connection; return whether the list had an element. Redis's errors pass through."""
        if self._started_at is None:  # no reply is due, so the server has closed the connection
            self.connection.disconnect()
            return False
        self._started_at = None
        try:
            return self.connection.read_response() is not None
        except self._channel.connection_errors:
            self.connection.disconnect()
            raise


class WaitPoller(MultiChannelPoller):
    """kombu's poller. Before each poll it starts the blocking waits of leased channels."""

    def __init__(self) -> None:
        super().__init__()
        self._readers: Mapping[int, tuple[Any, ...]] = {}
        self._reader: Any = None
        self._could_consume: list[tuple[bool, int]] = []
        self._check_at = -math.inf
        """Monotonic time at which all connections are checked again, even if nothing has happened."""

    def set_readers(self, reader: Any, readers: Mapping[int, tuple[Any, ...]]) -> None:
        """Set `readers`, the event loop's callbacks by descriptor, and `reader`, the callback of this poller."""
        self._reader, self._readers = reader, readers
        self._check_at = -math.inf

    def check_soon(self) -> None:
        """Check all connections again before the next poll."""
        self._check_at = -math.inf

    @property
    def fds(self) -> dict[int, Any]:
        """The descriptors that the event loop does not read yet. Before each poll kombu adds them, by system calls."""
        read = {fd for fd, (reader, *_) in self._readers.items() if reader == self._reader}
        return {fd: channel for fd, channel in super().fds.items() if fd not in read}

    def prepare(self, check: Callable[[], None]) -> None:
        """Call kombu's `check`, which visits all connections, if something may have changed since the last call.

        kombu calls `check` before each poll, and an engine wakes the loop up at each of its steps, where nothing has
        changed for the queue. A change that shows neither on a connection nor in a channel's free slots is noticed
        within two seconds: `check` is due after one second, and the loop wakes up once a second.
        """
        for channel in self._channels:
            channel.schedule_remaining_preempting()
        can_consume = [(channel.qos.can_consume(), channel.split_below()) for channel in self._channels]
        now = time.monotonic()
        if now < self._check_at and can_consume == self._could_consume:
            return
        check()
        self._check_at, self._could_consume = now + _CHECK_SECONDS, can_consume

    def _register_BRPOP(self, channel: Any) -> None:  # noqa: N802  # kombu's name
        """Let a channel wait as kombu's do, unless it is leased: it waits by `BlockingWait`.

        kombu does not read the reply of a BRPOP while there is no free slot. A leased channel has to, because the
        message that woke it then has to wake another worker.
        """
        if not channel.leased:
            super()._register_BRPOP(channel)

    def on_poll_start(self) -> None:
        super().on_poll_start()
        for channel in self._channels:
            if channel.leased and channel.qos.can_consume():
                channel.start_waits(self)
            elif channel.leased:
                channel.start_preempting_waits(self)

    def on_readable(self, fileno: int) -> Any:
        self._check_at = -math.inf
        channel, wait = self._fd_to_chan.get(fileno, (None, None))
        if isinstance(wait, BlockingWait):
            return channel.on_wait(wait)
        return super().on_readable(fileno)
