"""A short seeded cut of `make chaos`: every fault once."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.faults import FAULTS, kill_worker, restart_redis
from chaos.harness import Harness, summary
from chaos.model import save_chaos_model
from chaos.site import Site
from service.servers import OLDEST_PROGRAMS


@pytest.mark.timeout(900)
def test_whatever_breaks_no_request_is_lost_doubled_or_changed(tmp_path: Path) -> None:
    with Site(save_chaos_model(tmp_path / "tiny"), tmp_path) as site:
        harness = Harness(site, seed=20)
        harness.learn()
        rounds = harness.run(len(FAULTS), report=lambda _: None)
    assert [problem for done in rounds for problem in done.problems] == []
    total = summary(rounds)[-1]
    assert total["lost"] == total["broken"] == 0
    assert total["attacks"] > len(FAULTS)
    assert any("request preempted" in log.read_text() for log in tmp_path.glob("worker-*.log"))
    cut = {line["fault"]: line["cut"] for line in summary(rounds)}
    assert min(cut["cancel_requests"], cut["pass_deadlines"], cut["send_poison"]) > 0, (
        "nothing was ended before its end"
    )
    assert total["resumed"] >= len(FAULTS), "the faults came when nothing ran"


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
