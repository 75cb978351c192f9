"""Waiting for many lists at once without taking anything from them, inside kombu's event loop.

A queue is one list for each priority step, and Redis waits for a list without popping from it only one at a time. So
each list has a connection of its own, and an idle worker sleeps until one of them is answered.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from kombu.transport.redis import MultiChannelPoller

if TYPE_CHECKING:
    from headrace_broker.transport import Channel

WAIT_SECONDS: Final = 2.0
"""How long one wait takes where nothing comes. A server that has not answered some seconds later is gone."""

_OVERDUE_SECONDS: Final = WAIT_SECONDS + 5.0
_LOOK_SECONDS: Final = 1.0


def wait_command(list_name: str) -> tuple[Any, ...]:
    """Moving a list's last element to where it is waits for a message and leaves it there for the fetch."""
    return ("BLMOVE", list_name, list_name, "RIGHT", "RIGHT", WAIT_SECONDS)


class Doorbell:
    """Waits for one list of a channel. kombu's poller knows it by its `connection`."""

    def __init__(self, channel: "Channel", list_name: str) -> None:
        self._channel: Final = channel
        self._command: Final = wait_command(list_name)
        self.connection: Final = channel.async_pool.get_connection()
        self._armed_at: float | None = None

    def arm(self, poller: "DoorbellPoller") -> None:
        """Begin to wait, unless it does so already. Redis's errors pass through."""
        if self._armed_at is not None:
            if time.monotonic() - self._armed_at < _OVERDUE_SECONDS:
                return
            self.connection.disconnect()
        key = (self._channel, self, self)
        if self.connection._sock is None or key not in poller._chan_to_sock:
            poller._register(*key)
        self._armed_at = None
        self.connection.send_command(*self._command)
        self._armed_at = time.monotonic()

    def answer(self) -> bool:
        """The connection is readable. Whether the list has a message, or else the wait is over. Redis's errors pass."""
        if self._armed_at is None:  # nothing is expected, so the server has closed it
            self.connection.disconnect()
            return False
        self._armed_at = None
        try:
            return self.connection.read_response() is not None
        except self._channel.connection_errors:
            self.connection.disconnect()
            raise


class DoorbellPoller(MultiChannelPoller):
    """kombu's poller, which arms the doorbells of leased channels before each wait."""

    def __init__(self) -> None:
        super().__init__()
        self._readers: Mapping[int, tuple[Any, ...]] = {}
        self._reader: Any = None
        self._could_consume: list[bool] = []
        self._look_at = -math.inf
        """When all is to be looked through again, whatever has happened."""

    def read_by(self, reader: Any, readers: Mapping[int, tuple[Any, ...]]) -> None:
        """`readers` are the event loop's, by descriptor, of which ours call `reader`."""
        self._reader, self._readers = reader, readers
        self._look_at = -math.inf

    def look_soon(self) -> None:
        """All may be looked through again before the next wait."""
        self._look_at = -math.inf

    @property
    def fds(self) -> dict[int, Any]:
        """Those that the event loop is still to read: kombu adds them before each wait, by a system call each."""
        read = {fd for fd, (reader, *_) in self._readers.items() if reader == self._reader}
        return {fd: channel for fd, channel in super().fds.items() if fd not in read}

    def prepare(self, look: Callable[[], None]) -> None:
        """Before each wait: call kombu's `look`, which goes through all connections, where that can change anything.

        An engine wakes the loop up for each of its steps, and they change nothing here. What neither a connection nor
        a channel's credit tells waits for two seconds at most, as the loop wakes up once a second.
        """
        for channel in self._channels:
            channel.await_left_better()
        can_consume = [channel.qos.can_consume() for channel in self._channels]
        now = time.monotonic()
        if now < self._look_at and can_consume == self._could_consume:
            return
        look()
        self._look_at, self._could_consume = now + _LOOK_SECONDS, can_consume

    def on_poll_start(self) -> None:
        super().on_poll_start()
        for channel in self._channels:
            if channel.leased and channel.qos.can_consume():
                channel.arm_doorbells(self)
            elif channel.leased:
                channel.arm_doorbells_of_better(self)

    def on_readable(self, fileno: int) -> Any:
        self._look_at = -math.inf
        channel, doorbell = self._fd_to_chan.get(fileno, (None, None))
        if isinstance(doorbell, Doorbell):
            return channel.on_doorbell(doorbell)
        return super().on_readable(fileno)
