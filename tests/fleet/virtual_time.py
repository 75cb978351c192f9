"""`VirtualTime` runs generators by a clock that no real time moves. `Network` carries calls, and loses some of them."""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import suppress
from random import Random
from typing import Any, Protocol, TypeAlias

Actor: TypeAlias = Generator[float, None, None]
"""Yields the seconds after which it continues."""

_LOST, _QUICK, _DELAYED = 0.08, 0.65, 0.88
"""Shares of messages: lost; of the others, those that take 5 ms; and those that take less than 2 s."""
_LATEST = (5.0, 60.0)
"""Seconds that the rest takes. Most of them outlive a lease."""


class VirtualTime:
    """A clock in seconds, from 0, and the actors that wait for their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[tuple[float, int, Actor]] = []
        self._numbers = itertools.count()

    def start(self, actor: Actor, after: float = 0.0) -> None:
        """Let an actor begin or continue after these seconds."""
        heapq.heappush(self._waiting, (self.now + after, next(self._numbers), actor))

    def run(self, until: float) -> None:
        """Run until all actors have ended, or until this time."""
        while self._waiting and self._waiting[0][0] <= until:
            self.now, _, actor = heapq.heappop(self._waiting)
            with suppress(StopIteration):
                self.start(actor, next(actor))


class Server(Protocol):
    away_until: float
    """It refuses connections until this time."""

    def ran(self) -> None:
        """Take note that a call has run here."""


class Call:
    """A call to a server, and its reply once that has arrived."""

    def __init__(self) -> None:
        self.is_answered = self.is_refused = False
        self.reply: Any = None


class Network:
    """Carries calls. One may be lost before or after it ran, arrive after its caller has given up, or be overtaken.

    Args:
        calm_at: from then on every call arrives at once.
    """

    def __init__(self, time: VirtualTime, random: Random, calm_at: float) -> None:
        self._time, self._random, self._calm_at = time, random, calm_at
        self.counts: Counter[str] = Counter()

    @property
    def is_calm(self) -> bool:
        return self._time.now >= self._calm_at

    def call(self, server: Server, run: Callable[[], Any]) -> Call:
        """Send a call. It runs as a whole when it arrives, as a script does."""
        call = Call()
        self._time.start(self._carry(server, run, call))
        return call

    def _carry(self, server: Server, run: Callable[[], Any], call: Call) -> Actor:
        self.counts["calls"] += 1
        yield self._delay()
        if self._is_lost():
            return
        if self._time.now < server.away_until:
            self.counts["calls refused"] += 1
            call.is_refused = True
            return
        reply = run()
        server.ran()
        yield self._delay()
        if not self._is_lost():
            call.is_answered, call.reply = True, reply

    def _is_lost(self) -> bool:
        is_lost = not self.is_calm and self._random.random() < _LOST
        self.counts["messages lost"] += is_lost
        return is_lost

    def _delay(self) -> float:
        if self.is_calm:
            return 0.005
        share = self._random.random()
        if share < _QUICK:
            return 0.005
        if share < _DELAYED:
            return self._random.uniform(0.0, 2.0)
        self.counts["messages delayed by 5 s or more"] += 1
        return self._random.uniform(*_LATEST)
