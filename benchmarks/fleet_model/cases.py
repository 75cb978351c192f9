"""`Case`: one row of the table, a fleet and its load, simulated under several policies."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from fleet_model.arrivals import Arrivals, Request, Sizes
from fleet_model.engine import StepCost
from fleet_model.fleet import AFFINITY, FETCH_QUANTUM, GRACE, POLICIES, QUANTUM, Fleet, Plan
from fleet_model.routers import NUM_ROUTERS

_WARM_SHARE, _COOL_SHARE = 0.2, 0.05
"""Shares of the requests, the first and the last ones, that are simulated and not counted."""
_LEAST_TOKENS = 20
"""Time per token is counted for outputs of at least so many tokens."""


@dataclass(frozen=True)
class Case:
    name: str
    num_workers: int
    slots: int
    load: float
    """Arrivals as a share of what the fleet serves with all its slots used."""
    count: int
    """Requests."""
    policies: Sequence[str] = POLICIES
    burst: int = 1
    turns: int = 1
    slow_share: float = 0.0
    num_deaths: int = 0
    quantum: int = FETCH_QUANTUM
    sizes: Sizes = field(default_factory=Sizes)
    cost: StepCost = field(default_factory=StepCost)
    embeds: bool = False

    def plan(self, policy: str) -> Plan:
        seconds = self.count / self.rate
        deaths = [seconds * (number + 1) / (self.num_deaths + 1) for number in range(self.num_deaths)]
        return Plan(
            policy=policy,
            num_workers=self.num_workers,
            slots=self.slots,
            quantum=self.quantum,
            cost=self.cost,
            slow_share=self.slow_share,
            deaths=deaths,
            embeds=self.embeds,
        )

    def _means(self) -> tuple[float, float]:
        sample = self.sizes.sample()
        outputs = sum(output for output, _ in sample) / len(sample)
        prompt = sum(prompt for _, prompt in sample) / len(sample)
        return outputs, prompt

    @property
    def rate(self) -> float:
        """Requests a second."""
        outputs, prompt = self._means()
        slot = outputs * self.cost.seconds(self.slots, 0) / self.slots
        speed = self.num_workers - 0.5 * round(self.num_workers * self.slow_share)
        return self.load * speed / (slot + prompt * self.cost.per_prompt_token)

    def running(self, random: Random) -> list[list[Request]]:
        """Return requests that each worker runs at the beginning, so that the fleet need not fill first.

        Their number is the mean at this load. Their lengths are those of running requests: long ones run for longer.
        """
        outputs, prompt = self._means()
        rate = self.rate / self.num_workers
        rest = 1 - rate * prompt * self.cost.per_prompt_token
        share = rate * outputs / rest
        mean = min(float(self.slots), share * self.cost.base / max(1e-9, 1 - share * self.cost.per_request))
        sample = self.sizes.sample()
        weights = [output for output, _ in sample]
        begun: list[list[Request]] = []
        for worker in range(self.num_workers):
            number = int(mean) + (random.random() < mean % 1)
            sizes = random.choices(sample, weights, k=number)
            requests = []
            for place, (output, prompt) in enumerate(sizes):
                left = random.randint(1, output)
                requests.append(
                    Request(-1 - place - worker * self.slots, 0.0, left, prompt, router=place % NUM_ROUTERS)
                )
            begun.append(requests)
        return begun


def simulate(case: Case, policy: str, seed: int) -> dict[str, Any]:
    """Simulate one cell of the table. Returns times in milliseconds, but latencies in seconds."""
    started = time.perf_counter()
    arrivals = Arrivals(case.rate, case.count, case.sizes, case.burst, case.turns)
    requests = list(arrivals.requests(Random(seed)))
    fleet = Fleet(case.plan(policy), seed)
    fleet.run(requests, [] if case.turns > 1 or case.embeds else case.running(Random(seed + 1)))
    if any(request.num_served != 1 for request in requests):
        raise RuntimeError(f"{case.name}, {policy}: a request was not served exactly once")
    figures = measure(requests, case.plan(policy).publish_seconds)
    later_turns = sum(request.num_cached > 0 for request in requests)
    hits = sum(worker.engine.num_hits for worker in fleet.workers)
    return {
        "case": case.name, "policy": policy, "workers": case.num_workers, "slots": case.slots, "load": case.load,
        "requests": case.count, "rate": round(case.rate, 3), "seed": seed, **figures,
        "repeated_tokens": fleet.num_repeated,
        "hit_percent": round(100 * hits / later_turns, 1) if later_turns else None,
        "simulation_seconds": round(time.perf_counter() - started, 2),
    }  # fmt: skip


def measure(requests: Sequence[Request], publish_seconds: float) -> dict[str, float]:
    """Return percentiles of the requests between the first and the last ones."""
    counted = requests[int(len(requests) * _WARM_SHARE) : len(requests) - int(len(requests) * _COOL_SHARE)]
    ttft, latency, per_token = [], [], []
    for request in counted:
        assert request.first_at is not None
        assert request.ended_at is not None
        ttft.append(1000 * (request.first_at + publish_seconds - request.sent_at))
        latency.append(request.ended_at + publish_seconds - request.sent_at)
        if request.num_outputs >= _LEAST_TOKENS:
            per_token.append(1000 * (request.ended_at - request.first_at) / (request.num_outputs - 1))
    figures = {}
    for name, values in (("ttft_ms", ttft), ("latency_s", latency), ("token_ms", per_token)):
        values.sort()
        for percent in (50, 99):
            at = values[min(len(values) - 1, len(values) * percent // 100)] if values else 0.0
            figures[f"{name}_p{percent}"] = round(at, 3)
    return figures


LOADS = (0.5, 0.7, 0.8, 0.9, 0.95)
_COUNTS = {
    (10, 8): 10_000,
    (10, 64): 20_000,
    (100, 8): 20_000,
    (100, 64): 40_000,
    (1000, 8): 40_000,
    (1000, 64): 120_000,
}
"""Requests of a cell by workers and slots."""


def full_table() -> Iterator[Case]:
    for (workers, slots), count in _COUNTS.items():
        for load in LOADS:
            yield Case(f"{workers} x {slots}", workers, slots, load, count)
    yield from _special(20_000)


def quick_table() -> Iterator[Case]:
    """Cells of a fortieth of the size: they show that everything runs, and their figures mean little."""
    yield Case("10 x 8", 10, 8, 0.9, 300)
    yield Case("10 x 64", 10, 64, 0.9, 300)
    yield from _special(300)


def _special(count: int) -> Iterator[Case]:
    case = Case("10 x 64", 10, 64, 0.8, count)
    yield replace(case, name="bursts of 50", burst=50)
    for quantum in (1, 2, 8, 16):
        yield replace(case, name=f"bursts of 50, quantum {quantum}", burst=50, quantum=quantum, policies=(QUANTUM,))
    yield replace(case, name="2 of 10 at half speed", slow_share=0.2)
    yield replace(case, name="5 machines die", num_deaths=5)
    sessions = replace(case, slots=8, load=0.6, count=count // 2, turns=6, policies=(*POLICIES, AFFINITY, GRACE))
    yield replace(sessions, name="conversations of 6 turns")
    short = Sizes(output_median=1, output_sigma=0.0, prompt_median=60, prompt_sigma=0.8, most_prompt=2000)
    embedding = replace(
        case, load=0.7, embeds=True, sizes=short, burst=200, slots=256, cost=StepCost(0.005, 0, 0.00002)
    )
    yield replace(embedding, name="embeddings, bursts of 200")
