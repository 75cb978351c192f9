"""`SharedRead`: a value that is read from Redis at most once a second, and shared by all callers."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

_FRESH_SECONDS: Final = 1.0
Value = TypeVar("Value")


class SharedRead(Generic[Value]):
    """Callers during a read get its result, even if it is an error, so an unavailable server is asked once."""

    def __init__(self, read: Callable[[], Awaitable[Value]], now: Callable[[], float] = time.monotonic) -> None:
        self._read: Final = read
        self._now: Final = now
        self._reading: asyncio.Task[Value] | None = None
        self._read_at: float | None = None

    async def get(self) -> Value:
        """Return the value. Raises what the read raises."""
        if self._reading is None or (self._reading.done() and not self._is_fresh()):
            self._read_at = None
            self._reading = asyncio.create_task(self._read_once())
        return await asyncio.shield(self._reading)  # a cancelled caller does not cancel it for the others

    def _is_fresh(self) -> bool:
        return self._read_at is not None and self._now() - self._read_at < _FRESH_SECONDS

    async def _read_once(self) -> Value:
        value = await self._read()
        self._read_at = self._now()
        return value
