"""A short seeded cut of `make chaos`: every fault once, of which a short run takes four."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from chaos.faults import FAULTS, STREAM_SERVER_FAULTS, Fault, better_requests, kill_worker, restart_redis
from chaos.harness import Harness, summary
from chaos.model import save_chaos_model
from chaos.site import Site
from service.servers import OLDEST_PROGRAMS

SHORT_FAULTS = 4
ENDING = {"cancel_requests", "pass_deadlines", "send_poison"}
"""Faults that end requests before their end."""


@pytest.fixture
def chosen(request: pytest.FixtureRequest) -> Sequence[Fault]:
    """All faults, or in a short run one after which requests are continued, and those that its seed chooses."""
    if not request.config.getoption("short"):
        return FAULTS
    others = [fault for fault in FAULTS if fault is not kill_worker]
    draw = random.Random(request.config.getoption("randomly_seed", 0))
    return [kill_worker, *draw.sample(others, SHORT_FAULTS - 1)]


@pytest.mark.timeout(900)
def test_whatever_breaks_no_request_is_lost_doubled_or_changed(chosen: Sequence[Fault], tmp_path: Path) -> None:
    with Site(save_chaos_model(tmp_path / "tiny"), tmp_path) as site:
        harness = Harness(site, seed=20)
        harness.learn()
        rounds = harness.run(len(chosen), report=lambda _: None, faults=chosen)
    assert [problem for done in rounds for problem in done.problems] == []
    total = summary(rounds)[-1]
    assert total["lost"] == total["broken"] == 0
    assert total["attacks"] > len(chosen)
    was_preempted = any("request preempted" in log.read_text() for log in tmp_path.glob("worker-*.log"))
    assert was_preempted or better_requests not in chosen
    uncut = [line["fault"] for line in summary(rounds) if line["fault"] in ENDING and not line["cut"]]
    assert not uncut, "nothing was ended before its end"
    assert total["resumed"] > 0, "the faults came when nothing ran"


@pytest.mark.rotated
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", OLDEST_PROGRAMS)
def test_a_restart_of_the_oldest_servers_loses_no_request(program: str, tmp_path: Path) -> None:
    with Site(save_chaos_model(tmp_path / "tiny"), tmp_path, program=program) as site:
        harness = Harness(site, seed=21)
        harness.learn()
        rounds = harness.run(2, report=lambda _: None, faults=[restart_redis, kill_worker])
    assert [problem for done in rounds for problem in done.problems] == []
    assert summary(rounds)[-1]["lost"] == 0


@pytest.mark.rotated
@pytest.mark.timeout(900)
def test_faults_of_stream_servers_lose_no_request_of_another_server(tmp_path: Path) -> None:
    with Site(save_chaos_model(tmp_path / "tiny"), tmp_path, num_stream_servers=2) as site:
        harness = Harness(site, seed=22)
        harness.learn()
        rounds = harness.run(len(STREAM_SERVER_FAULTS), report=lambda _: None, faults=STREAM_SERVER_FAULTS)
    assert [problem for done in rounds for problem in done.problems] == []
    assert summary(rounds)[-1]["lost"] == 0
