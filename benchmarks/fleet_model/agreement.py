"""`compare`: the same requests on real workers whose engines sleep, and in the simulation."""

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from fleet_model.arrivals import Arrivals, Request, Sizes
from fleet_model.cases import measure
from fleet_model.engine import StepCost
from fleet_model.fleet import QUANTUM, Fleet, Plan
from headrace_broker import Client
from headrace_broker.streams.events import ChunkEvent, EndEvent, StartEvent

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from fleet.workers import STEP_TOKENS, sleeping_service

SLOTS = 16
STEP_SECONDS = 0.4
SIZES = Sizes(
    output_median=30, output_sigma=0.7, most_outputs=150, prompt_median=200, prompt_sigma=0.7, most_prompt=1500,
    least_prompt=8,
)  # fmt: skip
_NUM_PROBES = 20
_PROBE_TOKENS, _PROBE_PROMPT = 6, 200
_TIMEOUT = 300.0
_MEASURED = ("idle_step", "step", "idle_intake", "intake", "intake_p99", "publish")


class Readings:
    """When the events of each request reached this process, in seconds of its monotonic clock."""

    def __init__(self) -> None:
        self.sent: dict[str, float] = {}
        self.started: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.workers: dict[str, str] = {}

    def read(self, client: Client, ids: Sequence[str]) -> None:
        for request_id, event in client.events_many(ids, timeout=_TIMEOUT):
            now = time.monotonic()
            if isinstance(event, StartEvent):
                self.started.setdefault(request_id, now)
                self.workers[request_id] = event.worker
            elif isinstance(event, ChunkEvent):
                self.first.setdefault(request_id, now)
                self.last[request_id] = now
            elif isinstance(event, EndEvent):
                self.ended[request_id] = now

    def intakes(self) -> list[float]:
        """Return the seconds from sending each request until its worker has claimed it."""
        return [self.started[each] - sent for each, sent in self.sent.items()]


def compare(num_workers: int, load: float, seconds: float, seed: int) -> dict[str, Any]:
    """Run real workers and the simulation. Returns the figures of both and what was measured for the simulation."""
    sample = SIZES.sample()
    outputs = sum(output for output, _ in sample) / len(sample)
    rate = load * num_workers * SLOTS / (outputs * STEP_SECONDS)
    requests = list(Arrivals(rate, max(1, int(rate * seconds)), SIZES).requests(Random(seed)))
    with sleeping_service(STEP_SECONDS) as service, Client(service.url, model="tiny") as client:
        for _ in range(num_workers):  # one by one: many that load at once take too long on few cores
            service.start_workers(1, slots=SLOTS)
        _send(client, requests[: 4 * num_workers], "warm")
        probes = [Request(number, 4.0 * number, _PROBE_TOKENS, _PROBE_PROMPT) for number in range(_NUM_PROBES)]
        alone = _send(client, probes, "probe")
        real = _send(client, requests, "real")
    measured = _measured(alone, real, requests)
    return {
        "workers": num_workers, "slots": SLOTS, "load": load, "rate": round(rate, 2), "requests": len(requests),
        "seed": seed, **measured, "real": _figures(requests, real),
        "simulated": _simulated(num_workers, requests, real, measured, seed),
        "requests_by_worker": _by_worker(real),
    }  # fmt: skip


def _send(client: Client, requests: Sequence[Request], name: str) -> Readings:
    """Send the requests at their times; return when the events of their streams arrived."""
    readings = Readings()
    ids = [f"{name}-{request.number}" for request in requests]
    reader = threading.Thread(target=readings.read, args=(client, ids))
    reader.start()
    began = time.monotonic() - requests[0].sent_at
    for request_id, request in zip(ids, requests, strict=True):
        time.sleep(max(0.0, began + request.sent_at - time.monotonic()))
        readings.sent[request_id] = time.monotonic()
        client.submit(
            prompt_token_ids=prompt_of(request_id, request.num_prompt),
            sampling_params={"max_tokens": request.num_outputs, "ignore_eos": True},
            request_id=request_id,
        )
    reader.join()
    return readings


def prompt_of(request_id: str, length: int) -> list[int]:
    """Return token ids that share no prefix with another prompt."""
    random = Random(request_id)
    return [random.randrange(40, 140) for _ in range(length)]


def _measured(alone: Readings, real: Readings, requests: Sequence[Request]) -> dict[str, float]:
    """Measure what the simulation must know, in seconds.

    Args:
        alone: requests one by one, each to idle workers, of `_PROBE_TOKENS` tokens.
        real: the run that is simulated. On a busy machine its steps are slower than those of idle workers.
    """
    step = median((alone.last[each] - alone.first[each]) / (_PROBE_TOKENS - 1) for each in alone.sent)
    publish = median(alone.first[each] - alone.started[each] for each in alone.sent) - step
    tokens = sum(request.num_outputs - 1 for request in requests)
    intakes = sorted(real.intakes())
    return {
        "idle_step_seconds": round(step, 5),
        "step_seconds": round(sum(real.last[each] - real.first[each] for each in real.sent) / tokens, 5),
        "idle_intake_seconds": round(median(alone.intakes()), 5),
        "intake_seconds": round(median(intakes), 5),
        "intake_p99_seconds": round(intakes[len(intakes) * 99 // 100], 5),
        "publish_seconds": round(max(0.0, publish), 5),
    }


def _figures(requests: Sequence[Request], real: Readings) -> dict[str, float]:
    seen = []
    for request_id, request in zip(real.sent, requests, strict=True):
        each = Request(request.number, real.sent[request_id], request.num_outputs, request.num_prompt)
        each.first_at, each.ended_at = real.first[request_id], real.ended[request_id]
        seen.append(each)
    return measure(seen, 0.0)


def _simulated(
    num_workers: int, requests: Sequence[Request], real: Readings, measured: dict[str, float], seed: int
) -> dict[str, float]:
    """Simulate the requests at the times at which they were really sent.

    The intake is that of the run. It depends on the other work of the machine, and no request waits for a slot at loads
    of up to 0.8.
    """
    plan = Plan(
        policy=QUANTUM,
        num_workers=num_workers,
        slots=SLOTS,
        step_tokens=STEP_TOKENS,
        cost=StepCost(measured["step_seconds"], 0.0, 0.0),
        intake_seconds=real.intakes(),
        publish_seconds=measured["publish_seconds"],
    )
    began = min(real.sent.values())
    sent = [
        Request(request.number, at - began, request.num_outputs, request.num_prompt)
        for request, at in zip(requests, real.sent.values(), strict=True)
    ]
    Fleet(plan, seed).run(sent)
    return measure(sent, plan.publish_seconds)


def _by_worker(real: Readings) -> list[int]:
    counts: dict[str, int] = {}
    for worker in real.workers.values():
        counts[worker] = counts.get(worker, 0) + 1
    return sorted(counts.values(), reverse=True)


def report(figures: dict[str, Any]) -> None:
    title = f"{figures['workers']} workers of {SLOTS} slots, load {figures['load']:g}, {figures['requests']} requests"
    table = Table("", "real", "simulated", "difference, %", title=title)
    for name, label in (
        ("ttft_ms_p50", "TTFT p50, ms"),
        ("ttft_ms_p99", "TTFT p99, ms"),
        ("latency_s_p50", "latency p50, s"),
        ("latency_s_p99", "latency p99, s"),
    ):
        real, simulated = figures["real"][name], figures["simulated"][name]
        table.add_row(label, f"{real:.2f}", f"{simulated:.2f}", f"{100 * (simulated / real - 1):+.1f}")
    Console(width=100).print(table)
    milliseconds = {name: 1000 * figures[f"{name}_seconds"] for name in _MEASURED}
    print("measured, ms:", ", ".join(f"{name} {value:.1f}" for name, value in milliseconds.items()))
    print("requests by worker:", *figures["requests_by_worker"])
