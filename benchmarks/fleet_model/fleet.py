"""`Fleet`: sends requests to simulated workers, by a queue or by a router, until each has ended.

PullQueue --wake, fetch--> SimulatedWorker --prepared--> SimulatedEngine
Router ------one by one--> SimulatedWorker --prepared--> SimulatedEngine
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from random import Random
from typing import Any

from fleet_model.arrivals import Request
from fleet_model.engine import SimulatedEngine, StepCost
from fleet_model.queue import Messages, PullQueue
from fleet_model.routers import ROUTERS, Router
from fleet_model.worker import SimulatedWorker
from headrace_broker.queue.leases import PREFIXES_KEPT
from headrace_broker.settings import BrokerSettings
from headrace_workers.requests.token_credit import TokenCredit
from headrace_workers.settings import WorkerSettings


def _default(settings: type, name: str) -> Any:
    """Return the default of a setting of the product."""
    [default] = [each.default for each in fields(settings) if each.name == name]
    return default


FETCH_QUANTUM: int = _default(WorkerSettings, "fetch_quantum")
LEASE_SECONDS: float = _default(BrokerSettings, "lease_seconds")
PREFIX_GRACE: float = _default(BrokerSettings, "prefix_grace")
PULL, QUANTUM, AFFINITY, GRACE = "pull", "pull, quantum", "pull, affinity", "pull, affinity, grace"
POLICIES = (PULL, QUANTUM, *ROUTERS)
"""`PULL` takes as many messages as there are free slots. `AFFINITY` is `QUANTUM` with `--prefix-affinity` and a
`--prefix-grace` of 0, and `GRACE` is the same with the default grace."""


@dataclass(frozen=True)
class Plan:
    """A fleet. All times are in seconds."""

    policy: str
    num_workers: int
    slots: int
    quantum: int = FETCH_QUANTUM
    step_tokens: int = 2048
    cost: StepCost = field(default_factory=StepCost)
    intake_seconds: Sequence[float] = (0.005,)
    """From the message until the engine has the request: for a queue to fetch it, for a router to send it, and for both
    to prepare it. Each request gets a random one of these times."""
    publish_seconds: float = 0.001
    """From the end of a step until the client has its token."""
    slow_share: float = 0.0
    """Share of the workers that run at half speed."""
    deaths: Sequence[float] = ()
    """Times at which the machine of a random worker dies."""
    restart_seconds: float = 30.0
    """A dead machine returns after this time, which is longer than the intake and than a router takes to notice."""
    lease_seconds: float = LEASE_SECONDS
    """A queue gives the messages of a dead worker to others after its leases have expired."""
    notice_seconds: float = 5.0
    """A router notices a dead worker after this time, and sends its requests again from their beginning."""
    embeds: bool = False
    """Whether the workers limit what they take by tokens, as those of a pooling model do."""

    @property
    def pulls(self) -> bool:
        return self.policy not in ROUTERS


REAP_SECONDS = 0.4
"""The reaper looks for expired leases every 0.4 s."""


class Fleet:
    """Args:
    seed: of the choices of the routers and of the workers that die. Arrivals are given to `run`.
    messages: makes the order of the queue's messages, from a function that returns the time; None: by their arrival.
    """

    def __init__(
        self, plan: Plan, seed: int, messages: Callable[[Callable[[], float]], Messages] | None = None
    ) -> None:
        self.plan = plan
        self.now = 0.0
        # the same faults and intakes under each policy
        self._random, self._faults, self._intakes = Random(seed), Random(seed), Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self.workers = [self._worker(number) for number in range(plan.num_workers)]
        self.queue = PullQueue(
            self._wake,
            self._at,
            has_affinity=plan.policy in (AFFINITY, GRACE),
            grace=PREFIX_GRACE if plan.policy == GRACE else 0.0,
            messages=None if messages is None else messages(lambda: self.now),
        )
        self._router: Router | None = None
        if not plan.pulls:
            self._router = ROUTERS[plan.policy](plan.num_workers, self._random)
        self.num_repeated = 0
        """Tokens that were generated a second time."""
        self.num_deaths = 0
        for death in plan.deaths:
            self._at(death, self._kill)

    def _worker(self, number: int) -> SimulatedWorker:
        plan = self.plan
        engine = SimulatedEngine(
            self._at,
            lambda now, ended: self._on_step(worker, now, ended),
            slots=plan.slots,
            step_tokens=plan.step_tokens,
            cost=plan.cost,
            speed=0.5 if number < plan.num_workers * plan.slow_share else 1.0,
        )
        quantum = plan.slots if plan.policy == PULL else plan.quantum
        credit = TokenCredit(plan.step_tokens) if plan.embeds and plan.pulls else None
        worker = SimulatedWorker(number, plan.slots, quantum, engine, credit)
        return worker

    # -- time -----------------------------------------------------------------------------------------------------

    def _at(self, seconds: float, do: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (seconds, self._num_events, do))

    def run(self, requests: Sequence[Request], running: Sequence[Sequence[Request]] = ()) -> None:
        """Simulate until all requests have ended.

        Args:
            requests: in the order in which they are sent.
            running: requests that each worker runs at the beginning.
        """
        for worker, begun in zip(self.workers, running, strict=False):
            for request in begun:
                request.worker = worker.number
                if self._router is not None:
                    self._router.sent(request)
            worker.engine.populate(list(begun), 0.0)
        if self.plan.pulls:
            order = list(self.workers)
            self._random.shuffle(order)
            for worker in order:
                self._wait(worker)
        following = iter(requests)
        upcoming = next(following, None)
        while upcoming is not None or self._events:
            if upcoming is not None and (not self._events or upcoming.sent_at <= self._events[0][0]):
                self.now = upcoming.sent_at
                self._arrive(upcoming)
                upcoming = next(following, None)
            else:
                self.now, _, do = heapq.heappop(self._events)
                do()

    # -- requests -------------------------------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        if self._router is None:
            self.queue.push(request)
            return
        request.worker = self._router.choose(request, self.now)
        self._router.sent(request)
        self._take(self.workers[request.worker], [request])

    def _wake(self, worker: SimulatedWorker) -> None:
        self._at(self.now, partial(self._on_wake, worker))

    def _on_wake(self, worker: SimulatedWorker) -> None:
        count = worker.free_slots()
        if count <= 0:
            self.queue.pass_on(worker, self.now)
            return
        taken = self.queue.fetch(worker, count, self.now)
        for request in taken:
            if request.session >= 0:
                worker.remember(request.session, PREFIXES_KEPT)
        self._take(worker, taken)
        self._wait(worker)

    def _wait(self, worker: SimulatedWorker) -> None:
        if self.plan.pulls and worker.free_slots() > 0:
            self.queue.wait(worker, self.now)

    def _take(self, worker: SimulatedWorker, requests: Sequence[Request]) -> None:
        for request in requests:
            request.worker = worker.number
            worker.preparing[request] = None
            seconds = self._intakes.choice(self.plan.intake_seconds)
            self._at(self.now + seconds, partial(self._on_prepared, worker, request))

    def _on_prepared(self, worker: SimulatedWorker, request: Request) -> None:
        if worker.is_dead:
            return  # the request was lost with the worker, and is sent again
        del worker.preparing[request]
        if worker.token_credit is not None:
            worker.token_credit.took(request.num_prompt)
        worker.engine.give(request, self.now)
        self._wait(worker)

    def _on_step(self, worker: SimulatedWorker, now: float, ended: list[Request]) -> None:
        for request in ended:
            request.num_done = request.num_outputs
            request.ended_at = now
            request.num_served += 1
            if self._router is not None:
                self._router.ended(request)
        self._wait(worker)

    # -- deaths ---------------------------------------------------------------------------------------------------

    def _kill(self) -> None:
        alive = [worker for worker in self.workers if not worker.is_dead]
        if len(alive) <= (0 if self.plan.pulls else 1):
            return  # a router needs a worker to choose
        worker = self._faults.choice(alive)
        self.num_deaths += 1
        lost = worker.die(self.now)
        self._at(self.now + self.plan.restart_seconds, partial(self._restart, worker))
        if self._router is None:
            self.queue.forget(worker)
            # it renewed its leases at some time of the last third
            lease = self.plan.lease_seconds * self._faults.uniform(2 / 3, 1) + self._faults.uniform(0, REAP_SECONDS)
            for request in lost:
                self._at(self.now + lease, partial(self.queue.requeue, request))
        else:
            self._at(self.now + self.plan.notice_seconds, partial(self._resend, worker, lost))

    def _resend(self, worker: SimulatedWorker, lost: Sequence[Request]) -> None:
        """Send the requests of a dead worker to others, and those that were sent to it after its death."""
        assert self._router is not None
        self._router.died(worker.number)
        unsent, worker.preparing = [*lost, *worker.preparing], {}
        for request in unsent:
            self._router.ended(request)
            self.num_repeated += request.num_done
            request.num_done = 0
            self._arrive(request)

    def _restart(self, worker: SimulatedWorker) -> None:
        worker.is_dead = False
        if self._router is not None:
            self._router.returned(worker.number)
        self._wait(worker)
