"""`FreeSlots`: with a prefix grace, messages of this worker's conversations wait for it while it has free slots."""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import redis

from headrace_broker.keys import CREDIT_MILLISECONDS, credit_key, holder_wake_up_key

_SECONDS: Final = 2.0
"""How often an idle worker tells the others how many free slots it has."""


class FreeSlots:
    """What one worker tells the queues of one Redis database. Redis's errors pass through.

    Args:
        owner: of the worker's leases.
        has_grace: whether there is a prefix grace. Without one, `tell` does nothing.
        clock: monotonic time in seconds.
    """

    def __init__(self, client: "redis.Redis", owner: str, *, has_grace: bool, clock: Callable[[], float]) -> None:
        self._client: Final = client
        self._owner: Final = owner
        self._has_grace: Final = has_grace
        self._clock: Final = clock
        self._tell_from: Final[dict[str, float]] = {}
        """By queue: when `tell` writes again. Until then Redis knows that there are free slots."""

    def tell(self, queue: str, slots: int) -> None:
        """Let messages wait for this worker, as it has free slots.

        To be called whenever the worker begins to wait: it writes only every two seconds, or after a fetch that has
        filled all slots. Does nothing if Redis refuses to write: then the messages do not wait.
        """
        if self._has_grace and self._clock() >= self._tell_from.get(queue, -math.inf):
            self._tell_from[queue] = self._clock() + _SECONDS
            with suppress(redis.ResponseError):
                self._client.set(credit_key(queue, self._owner), slots, px=CREDIT_MILLISECONDS)

    def filled(self, queue: str) -> None:
        """Take note that a fetch has filled all slots. Its script has told the queue."""
        self._tell_from.pop(queue, None)

    def withdraw(self, queue: str) -> None:
        """Let no message wait for this worker, as it cannot fetch."""
        self._tell_from.pop(queue, None)
        self._client.delete(credit_key(queue, self._owner))

    def wake_up_again(self, queue: str) -> None:
        """Create this worker's own wake-up token again, because it could not fetch yet."""
        key = holder_wake_up_key(queue, self._owner)
        with self._client.pipeline(transaction=True) as commands:
            commands.lpush(key, "1")
            commands.pexpire(key, CREDIT_MILLISECONDS)
            commands.execute()
