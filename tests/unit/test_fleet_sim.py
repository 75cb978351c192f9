"""The simulated fleet serves each request once, repeats its figures, and takes messages by the product's rules."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from fleet_model.arrivals import Arrivals, Request, Sizes
from fleet_model.cases import Case, simulate
from fleet_model.engine import StepCost
from fleet_model.fleet import AFFINITY, GRACE, POLICIES, PREFIX_GRACE, PULL, QUANTUM, Fleet, Plan
from fleet_model.queue import affinity_limits
from headrace_workers.requests import fetch_quantum

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "fleet_sim.py"

STEP = 1.0
CASE = Case("a small fleet", 5, 8, 0.8, 200)
BURSTS = replace(CASE, slots=64, burst=20)


def only_steps(policy: str, num_workers: int, slots: int = 8, **options: object) -> Plan:
    """Return a fleet in which nothing but steps takes time, each `STEP` seconds."""
    plan = Plan(policy, num_workers, slots, cost=StepCost(STEP, 0.0, 0.0), intake_seconds=[0.0], publish_seconds=0.0)
    return replace(plan, **options)  # type: ignore[arg-type]


def some(count: int, *, sent_at: float = 0.0, outputs: int = 3, prompt: int = 10) -> list[Request]:
    return [Request(number, sent_at, outputs, prompt) for number in range(count)]


@pytest.mark.parametrize("policy", [*POLICIES, AFFINITY, GRACE])
def test_each_request_is_served_exactly_once_though_machines_die(policy: str) -> None:
    case = replace(CASE, num_deaths=4)
    requests = list(Arrivals(case.rate, case.count, turns=3).requests(Random(1)))
    fleet = Fleet(case.plan(policy), 1)
    fleet.run(requests, case.running(Random(2)))
    assert [request.num_served for request in requests] == [1] * case.count
    assert all(request.num_done == request.num_outputs for request in requests)
    assert fleet.num_deaths >= 3
    assert len(fleet.queue) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_seed_gives_the_same_figures_again(policy: str) -> None:
    once, again, other = (simulate(replace(BURSTS, num_deaths=1), policy, seed) for seed in (1, 1, 2))
    for cell in (once, again, other):
        del cell["simulation_seconds"], cell["seed"]
    assert once == again
    assert once != other


def test_an_engine_takes_as_many_steps_as_a_request_has_tokens() -> None:
    [request] = requests = some(1)
    Fleet(only_steps(QUANTUM, 1), 1).run(requests)
    assert (request.first_at, request.ended_at) == (1 * STEP, 3 * STEP)


def test_a_request_that_arrives_during_a_step_begins_with_the_next_one() -> None:
    early, late = requests = [Request(0, 0.0, 10, 10), Request(1, 4.5, 2, 10)]
    Fleet(only_steps(QUANTUM, 1), 1).run(requests)
    assert (late.first_at, late.ended_at, early.ended_at) == (6 * STEP, 7 * STEP, 10 * STEP)


def test_a_step_computes_no_more_tokens_than_its_limit() -> None:
    long, short = requests = [Request(0, 0.0, 1, 250), Request(1, 0.1, 1, 40)]
    Fleet(only_steps(QUANTUM, 1, step_tokens=100), 1).run(requests)
    assert (long.first_at, short.first_at) == (3 * STEP, 3 * STEP)


def test_a_slow_worker_takes_twice_as_long_for_a_step() -> None:
    [request] = requests = some(1)
    Fleet(only_steps(QUANTUM, 1, slow_share=1.0), 1).run(requests)
    assert request.ended_at == 6 * STEP


def test_a_request_of_a_dead_worker_resumes_after_its_last_token_once_its_lease_has_expired() -> None:
    [request] = requests = some(1, outputs=30)
    fleet = Fleet(only_steps(QUANTUM, 1, deaths=[10.5], restart_seconds=1.0, lease_seconds=15.0), 1)
    fleet.run(requests)
    assert request.ended_at is not None
    assert 10.5 + 10 + 20 < request.ended_at < 10.5 + 15 + 1 + 20 + STEP
    assert fleet.num_repeated == 0


def test_a_router_sends_the_requests_of_a_dead_worker_again_from_their_beginning() -> None:
    requests = some(2, outputs=30)  # one a worker
    fleet = Fleet(only_steps("least connections", 2, deaths=[10.5], notice_seconds=5.0, restart_seconds=100.0), 1)
    fleet.run(requests)
    assert sorted(request.ended_at or 0.0 for request in requests) == [30 * STEP, (16 + 30) * STEP]
    assert fleet.num_repeated == 10


@pytest.mark.parametrize(("policy", "most"), [(PULL, 20), (QUANTUM, 9)])
def test_a_quantum_divides_a_burst(policy: str, most: int) -> None:
    requests = some(20)
    Fleet(replace(only_steps(policy, 4, slots=64), intake_seconds=[0.01]), 1).run(requests)
    shares = [sum(request.worker == number for request in requests) for number in range(4)]
    assert sum(shares) == 20
    assert max(shares) <= most
    assert (max(shares) == 20) == (policy == PULL)


def test_a_quantum_shortens_the_time_to_the_first_token_of_a_burst() -> None:
    greedy, divided = (simulate(BURSTS, policy, 1)["ttft_ms_p50"] for policy in (PULL, QUANTUM))
    assert divided < 0.7 * greedy


def test_the_simulation_follows_the_products_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    before = simulate(BURSTS, QUANTUM, 1)["ttft_ms_p50"]
    rule = fetch_quantum.choices_to_fetch
    asked: list[int] = []

    def one_at_most(**numbers: int) -> int:
        asked.append(numbers["quantum"])
        return min(1, rule(**numbers))

    monkeypatch.setattr(fetch_quantum, "choices_to_fetch", one_at_most)
    assert simulate(BURSTS, QUANTUM, 1)["ttft_ms_p50"] != before
    assert set(asked) == {BURSTS.quantum}


def test_the_simulation_follows_the_products_rule_for_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    short = Sizes(output_median=1, output_sigma=0.0, prompt_median=60, prompt_sigma=0.8, most_prompt=2000)
    case = replace(BURSTS, slots=256, burst=100, embeds=True, sizes=short)
    before = simulate(case, QUANTUM, 1)["ttft_ms_p50"]
    monkeypatch.setattr("headrace_workers.requests.token_credit.TokenCredit.messages", lambda *_: 1)
    assert simulate(case, QUANTUM, 1)["ttft_ms_p50"] != before


@pytest.mark.parametrize("embeds", [False, True])
def test_requests_that_wait_in_the_engine_stop_a_worker_only_if_its_model_generates(embeds: bool) -> None:
    [worker] = Fleet(only_steps(QUANTUM, 1, embeds=embeds), 1).workers
    assert worker.free_slots() > 0
    worker.engine.num_waiting = 1
    assert (worker.free_slots() > 0) == embeds


def test_a_grace_finds_the_cached_prefixes_of_conversations_and_delays_no_first_token_by_more_than_itself() -> None:
    case = replace(CASE, load=0.7, count=1500, turns=6)
    without, graced = (simulate(case, policy, 1) for policy in (AFFINITY, GRACE))
    assert without["hit_percent"] < 50
    assert graced["hit_percent"] > 90
    assert graced["ttft_ms_p99"] < without["ttft_ms_p99"] + 1000 * PREFIX_GRACE


def test_affinity_reads_its_limits_from_the_fetch_script() -> None:
    candidates, most_skips = affinity_limits()
    assert candidates > most_skips > 0


def test_the_quick_table_has_all_policies_and_a_plot(tmp_path: Path) -> None:
    figures, drawing = tmp_path / "cells.json", tmp_path / "plot.svg"
    command = [sys.executable, PROGRAM, "--quick", "--processes", "1"]
    subprocess.run([*command, "--json", figures, "--plot", drawing], check=True, capture_output=True, timeout=300)
    cells = json.loads(figures.read_text())["cells"]
    assert {cell["policy"] for cell in cells} == {*POLICIES, AFFINITY, GRACE}
    assert all(cell["ttft_ms_p50"] > 0 for cell in cells)
    assert drawing.read_text().startswith("<svg")
