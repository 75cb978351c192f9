"""`Router`: chooses the worker of a request when it arrives. The request moves to another one only if its own dies."""

from collections import defaultdict
from collections.abc import Callable
from random import Random
from typing import Protocol

from fleet_model.arrivals import Request

VIEW_SECONDS = 1.0
"""After so many seconds a router with a stale view sees the workers' loads again."""
NUM_ROUTERS = 8
"""Of `ManyRouters`."""


class Router(Protocol):
    def choose(self, request: Request, now: float, /) -> int:
        """Return the number of a worker that is not known to be dead."""

    def sent(self, request: Request) -> None:
        """Note that `request.worker` has it."""

    def ended(self, request: Request) -> None:
        """Note that `request.worker` has ended it, or has lost it."""

    def died(self, worker: int) -> None:
        """Choose this worker no more."""

    def returned(self, worker: int) -> None:
        """Choose this worker again."""


class RoundRobin:
    def __init__(self, num_workers: int, _random: Random) -> None:
        self._num_workers, self._next, self._dead = num_workers, -1, set[int]()

    def choose(self, _request: Request, _now: float, /) -> int:
        while True:
            self._next = (self._next + 1) % self._num_workers
            if self._next not in self._dead:
                return self._next

    def sent(self, request: Request) -> None: ...

    def ended(self, request: Request) -> None: ...

    def died(self, worker: int) -> None:
        self._dead.add(worker)

    def returned(self, worker: int) -> None:
        self._dead.discard(worker)


class LeastConnections:
    """Chooses a random one of the workers with the fewest requests, in constant time."""

    def __init__(self, num_workers: int, random: Random) -> None:
        self._random = random
        self._by_load: defaultdict[int, list[int]] = defaultdict(list)
        self._place = [0] * num_workers
        self.loads = [0] * num_workers
        self._least = 0
        self._dead: set[int] = set()
        for worker in range(num_workers):
            self._insert(worker)

    def _insert(self, worker: int) -> None:
        workers = self._by_load[self.loads[worker]]
        self._place[worker] = len(workers)
        workers.append(worker)
        self._least = min(self._least, self.loads[worker])

    def _take_out(self, worker: int) -> None:
        workers = self._by_load[self.loads[worker]]
        last = workers.pop()
        if last != worker:
            workers[self._place[worker]] = last
            self._place[last] = self._place[worker]

    def add(self, worker: int, count: int) -> None:
        """Count more or fewer requests of a worker."""
        if worker in self._dead:
            self.loads[worker] += count
            return
        self._take_out(worker)
        self.loads[worker] += count
        self._insert(worker)

    def choose(self, _request: Request, _now: float, /) -> int:
        while not self._by_load[self._least]:
            self._least += 1
        return self._random.choice(self._by_load[self._least])

    def sent(self, request: Request) -> None:
        self.add(request.worker, 1)

    def ended(self, request: Request) -> None:
        self.add(request.worker, -1)

    def died(self, worker: int) -> None:
        self._take_out(worker)
        self._dead.add(worker)

    def returned(self, worker: int) -> None:
        self._dead.discard(worker)
        self._insert(worker)


class ManyRouters:
    """Sends each request through one of `NUM_ROUTERS` routers. Each knows only what it has sent itself."""

    def __init__(self, num_workers: int, random: Random) -> None:
        self._random = random
        self._routers = [LeastConnections(num_workers, random) for _ in range(NUM_ROUTERS)]

    def choose(self, request: Request, now: float, /) -> int:
        request.router = self._random.randrange(NUM_ROUTERS)
        return self._routers[request.router].choose(request, now)

    def sent(self, request: Request) -> None:
        self._routers[request.router].sent(request)

    def ended(self, request: Request) -> None:
        self._routers[request.router].ended(request)

    def died(self, worker: int) -> None:
        for router in self._routers:
            router.died(worker)

    def returned(self, worker: int) -> None:
        for router in self._routers:
            router.returned(worker)


class StaleShortestQueue(LeastConnections):
    """Sees the loads once in `VIEW_SECONDS`, and adds its own requests to them meanwhile."""

    def __init__(self, num_workers: int, random: Random) -> None:
        super().__init__(num_workers, random)
        self._real = [0] * num_workers
        self._seen_at = 0.0

    def choose(self, request: Request, now: float, /) -> int:
        if now - self._seen_at >= VIEW_SECONDS:
            self._seen_at = now
            for worker, load in enumerate(self._real):
                if load != self.loads[worker]:
                    self.add(worker, load - self.loads[worker])
        return super().choose(request, now)

    def sent(self, request: Request) -> None:
        super().sent(request)
        self._real[request.worker] += 1

    def ended(self, request: Request) -> None:
        self._real[request.worker] -= 1


class PowerOfTwo:
    """Draws two workers and takes the one with fewer requests."""

    def __init__(self, num_workers: int, random: Random) -> None:
        self._random = random
        self._loads = [0] * num_workers
        self._alive = list(range(num_workers))

    def choose(self, _request: Request, _now: float, /) -> int:
        one, other = self._random.choice(self._alive), self._random.choice(self._alive)
        return one if self._loads[one] <= self._loads[other] else other

    def sent(self, request: Request) -> None:
        self._loads[request.worker] += 1

    def ended(self, request: Request) -> None:
        self._loads[request.worker] -= 1

    def died(self, worker: int) -> None:
        self._alive.remove(worker)

    def returned(self, worker: int) -> None:
        self._alive.append(worker)


ROUTERS: dict[str, Callable[[int, Random], Router]] = {
    "round robin": RoundRobin,
    "least connections": LeastConnections,
    "8 routers": ManyRouters,
    "stale shortest queue": StaleShortestQueue,
    "power of two": PowerOfTwo,
}
