"""`PullQueue`: the queue in Redis, and the workers that wait for its messages.

An idle worker has two blocking waits: for the list of new messages, and for the wake-up token. Redis answers the wait
that is the oldest. A fetch sorts all new messages, takes some, and creates the token if it leaves any.
`broker/headrace_broker/queue/blocking_wait.py` and `lua/ready_prelude.lua` have the rules.
"""

import re
from collections import deque
from collections.abc import Callable, Collection, Iterator
from importlib.resources import files
from itertools import islice
from typing import Protocol

from fleet_model.arrivals import Request
from fleet_model.worker import SimulatedWorker
from headrace_broker.keys import CREDIT_MILLISECONDS, HOLDERS_KEPT


def affinity_limits() -> tuple[int, int]:
    """Read from the fetch script among how many messages affinity chooses, and how often it skips one."""
    text = files("headrace_broker").joinpath("lua", "lease_fetch.lua").read_text(encoding="utf-8")
    found = re.search(r"^local CANDIDATES, MOST_SKIPS = (\d+), (\d+)$", text, re.MULTILINE)
    assert found is not None, "lease_fetch.lua no longer declares CANDIDATES and MOST_SKIPS"
    return int(found[1]), int(found[2])


class Messages(Protocol):
    """The waiting messages, in the order in which they are taken. A deque has the order of their arrival."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def append(self, request: Request, /) -> None:
        """Add a new message."""

    def appendleft(self, request: Request, /) -> None:
        """Return a message that was taken."""

    def popleft(self) -> Request:
        """Take the next message."""

    def remove(self, request: Request, /) -> None:
        """Take this message."""


class PullQueue:
    """Args:
    wake: wakes a worker, which then calls `fetch` or `pass_on`.
    at: calls a function at a time of the simulation.
    has_affinity: whether fetches prefer messages of conversations that the worker has served.
    grace: seconds for which the next message of a conversation waits for the worker that took the last one.
    messages: gives the waiting messages their order; None: that of their arrival.
    """

    def __init__(
        self,
        wake: Callable[[SimulatedWorker], None],
        at: Callable[[float, Callable[[], None]], None],
        *,
        has_affinity: bool = False,
        grace: float = 0.0,
        messages: Messages | None = None,
    ) -> None:
        self._wake, self._at, self._grace = wake, at, grace
        self._holders: dict[int, SimulatedWorker] = {}
        """By conversation, the newest last. Redis counts each request of a conversation, and so knows fewer of them."""
        self._credits: dict[SimulatedWorker, tuple[int, float]] = {}
        """Free slots of a worker, and when it told them."""
        self._offered: dict[Request, SimulatedWorker] = {}
        self._for_holder = _Waits()
        self._has_own_token: set[SimulatedWorker] = set()
        """Workers with a wake-up token of their own."""
        self._affinity = affinity_limits() if has_affinity else None
        self._messages: Messages = deque[Request]() if messages is None else messages
        self._num_new = 0
        """Messages in the list: no wait was there for them, and no fetch has sorted them."""
        self._has_token = False
        self._for_list = _Waits()
        self._for_token = _Waits()

    def __len__(self) -> int:
        return len(self._messages)

    def push(self, request: Request) -> None:
        """Add a new message. It wakes the worker that has waited for the longest time."""
        self._messages.append(request)
        if (worker := self._for_list.pop()) is not None:
            self._wake(worker)
        else:
            self._num_new += 1

    def requeue(self, request: Request) -> None:
        """Return the message of an expired lease, as the next one."""
        self._messages.appendleft(request)
        self._update_token()

    def wait(self, worker: SimulatedWorker, now: float) -> None:
        """Start the waits that a worker with free slots does not have yet."""
        if self._grace and self._credit(worker, now) <= 0:
            self._credits[worker] = worker.free_slots(), now
        if worker in self._has_own_token:
            self._has_own_token.discard(worker)
            self._wake(worker)
        elif self._num_new and not self._for_list.has(worker):
            self._num_new -= 1
            self._wake(worker)
        elif self._has_token and not self._for_token.has(worker):
            self._has_token = False
            self._wake(worker)
        else:
            self._for_list.add(worker)
            self._for_token.add(worker)
            self._for_holder.add(worker)

    def forget(self, worker: SimulatedWorker) -> None:
        """End the waits of a worker that has died."""
        self._for_list.discard(worker)
        self._for_token.discard(worker)
        self._for_holder.discard(worker)

    def fetch(self, worker: SimulatedWorker, count: int, now: float) -> list[Request]:
        """Take up to `count` messages for a worker."""
        self._num_new = 0
        waiting = self._offer(worker, now) if self._grace else set()
        taken: list[Request] = []
        while len(taken) < count and (following := self._next(worker, waiting)) is not None:
            taken.append(following)
            self._offered.pop(following, None)
            if self._grace and following.session >= 0:
                self._holders.pop(following.session, None)
                self._holders[following.session] = worker
        while len(self._holders) > HOLDERS_KEPT:
            del self._holders[next(iter(self._holders))]
        self._credits[worker] = count - len(taken), now
        if len(taken) == count or not waiting:
            self._update_token()
        else:
            self._has_token = False
        return taken

    def _credit(self, worker: SimulatedWorker, now: float) -> int:
        slots, told_at = self._credits.get(worker, (0, now))
        is_heard = self._for_list.has(worker) or now - told_at < CREDIT_MILLISECONDS / 1000
        return slots if is_heard else 0

    def _offer(self, worker: SimulatedWorker, now: float) -> set[Request]:
        """Wake the holders of the first messages' conversations. Returns the messages that wait for them now."""
        waiting, offered = set(), dict.fromkeys(self._credits, 0)
        for request in islice(self._messages, self._affinity[0] if self._affinity else 0):
            holder = self._holders.get(request.session) if request.num_cached else None
            if holder is None or holder is worker or now >= request.sent_at + self._grace:
                continue
            if offered[holder] >= self._credit(holder, now):
                continue
            offered[holder] += 1
            waiting.add(request)
            if self._offered.get(request) is not holder:
                self._offered[request] = holder
                if self._for_holder.has(holder):
                    self._for_holder.discard(holder)
                    self._wake(holder)
                else:
                    self._has_own_token.add(holder)
                self._at(request.sent_at + self._grace, lambda: self._wake(worker))
        return waiting

    def pass_on(self, worker: SimulatedWorker, now: float) -> None:
        """Wake another worker, as this one was woken and has no free slot."""
        self._credits[worker] = 0, now
        while self._num_new and (other := self._for_list.pop()) is not None:
            self._num_new -= 1
            self._wake(other)
        self._update_token()

    def _update_token(self) -> None:
        self._has_token = False
        if self._messages and (worker := self._for_token.pop()) is not None:
            self._wake(worker)
        else:
            self._has_token = bool(self._messages)

    def _next(self, worker: SimulatedWorker, waiting: Collection[Request]) -> Request | None:
        """Take the worker's next message, unless all wait for their holders."""
        if self._affinity is None:
            return self._messages.popleft() if self._messages else None
        among = [each for each in islice(self._messages, self._affinity[0]) if each not in waiting]
        if not among:
            return None
        first = chosen = among[0]
        if first.skipped < self._affinity[1]:
            chosen = next((each for each in among if self._holders.get(each.session) is worker), None) or next(
                (each for each in among if each.session in worker.sessions), first
            )
        first.skipped += chosen is not first
        self._messages.remove(chosen)
        return chosen


class _Waits:
    """Blocking waits of one kind, the oldest first."""

    def __init__(self) -> None:
        self._workers: dict[SimulatedWorker, None] = {}

    def has(self, worker: SimulatedWorker) -> bool:
        return worker in self._workers

    def add(self, worker: SimulatedWorker) -> None:
        self._workers.setdefault(worker)

    def discard(self, worker: SimulatedWorker) -> None:
        self._workers.pop(worker, None)

    def pop(self) -> SimulatedWorker | None:
        """End the oldest wait."""
        worker = next(iter(self._workers), None)
        if worker is not None:
            del self._workers[worker]
        return worker
