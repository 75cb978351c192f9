"""`PullQueue`: the queue in Redis, and the workers that wait for its messages.

An idle worker has two blocking waits: for the list of new messages, and for the wake-up token. Redis answers the wait
that is the oldest. A fetch sorts all new messages, takes some, and creates the token if it leaves any.
`broker/headrace_broker/queue/blocking_wait.py` and `lua/ready_prelude.lua` have the rules.
"""

import re
from collections import deque
from collections.abc import Callable
from importlib.resources import files
from itertools import islice

from fleet_model.arrivals import Request
from fleet_model.worker import SimulatedWorker


def affinity_limits() -> tuple[int, int]:
    """Read from the fetch script among how many messages affinity chooses, and how often it skips one."""
    text = files("headrace_broker").joinpath("lua", "lease_fetch.lua").read_text(encoding="utf-8")
    found = re.search(r"^local CANDIDATES, MOST_SKIPS = (\d+), (\d+)$", text, re.MULTILINE)
    assert found is not None, "lease_fetch.lua no longer declares CANDIDATES and MOST_SKIPS"
    return int(found[1]), int(found[2])


class PullQueue:
    """Args:
    wake: wakes a worker, which then calls `fetch` or `pass_on`.
    has_affinity: whether fetches prefer messages of conversations that the worker has served.
    """

    def __init__(self, wake: Callable[[SimulatedWorker], None], *, has_affinity: bool = False) -> None:
        self._wake = wake
        self._affinity = affinity_limits() if has_affinity else None
        self._messages: deque[Request] = deque()
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

    def wait(self, worker: SimulatedWorker) -> None:
        """Start the waits that a worker with free slots does not have yet."""
        if self._num_new and not self._for_list.has(worker):
            self._num_new -= 1
            self._wake(worker)
        elif self._has_token and not self._for_token.has(worker):
            self._has_token = False
            self._wake(worker)
        else:
            self._for_list.add(worker)
            self._for_token.add(worker)

    def forget(self, worker: SimulatedWorker) -> None:
        """End the waits of a worker that has died."""
        self._for_list.discard(worker)
        self._for_token.discard(worker)

    def fetch(self, worker: SimulatedWorker, count: int) -> list[Request]:
        """Take up to `count` messages for a worker."""
        self._num_new = 0
        taken = [self._next(worker) for _ in range(min(count, len(self._messages)))]
        self._update_token()
        return taken

    def pass_on(self) -> None:
        """Wake another worker, as the one that was woken has no free slot."""
        while self._num_new and (worker := self._for_list.pop()) is not None:
            self._num_new -= 1
            self._wake(worker)
        self._update_token()

    def _update_token(self) -> None:
        self._has_token = False
        if self._messages and (worker := self._for_token.pop()) is not None:
            self._wake(worker)
        else:
            self._has_token = bool(self._messages)

    def _next(self, worker: SimulatedWorker) -> Request:
        first = self._messages[0]
        if self._affinity is None or first.session in worker.sessions or first.skipped >= self._affinity[1]:
            return self._messages.popleft()
        for position, other in enumerate(islice(self._messages, self._affinity[0])):
            if other.session in worker.sessions:
                first.skipped += 1
                del self._messages[position]
                return other
        return self._messages.popleft()


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
