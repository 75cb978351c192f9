"""A short seeded cut of `make chaos-versions`."""

import re
from pathlib import Path

import pytest

from chaos.faults import kill_worker
from chaos.harness import Harness, summary
from chaos.model import save_chaos_model
from chaos.versions import MixedSite, exchange_versions, problems_of_meetings
from service.earlier_code import extract

EARLIER = "e86c438f"
"""The last commit without a number of the wire format."""


@pytest.mark.rotated
@pytest.mark.timeout(900)
def test_versions_that_serve_together_lose_no_request_of_each_other(tmp_path: Path) -> None:
    if not extract(EARLIER, tmp_path / "earlier"):
        pytest.skip(f"the history of git has no commit {EARLIER}")
    with MixedSite(save_chaos_model(tmp_path / "tiny"), tmp_path, tmp_path / "earlier") as site:
        harness = Harness(site, seed=22)
        harness.learn()
        rounds = harness.run(2, report=lambda _: None, faults=[kill_worker, exchange_versions])
        exported = site.queue_as_exported()
    assert [problem for done in rounds for problem in done.problems] == []
    assert summary(rounds)[-1]["resumed"] > 0
    assert sum(site.meetings.values()) == 16
    assert exported[0] == exported[1]
    assert re.search(r'state="ready"} 3', exported[0]), exported[0]


def test_a_pair_of_versions_that_never_met_is_named() -> None:
    met = {("new", "new", "new"): 3, ("earlier", "new", "earlier"): 1, ("earlier", "earlier", "earlier"): 1}
    assert problems_of_meetings(met) == [
        "no earlier worker began a request of the new client",
        "no new worker ended what the earlier one had begun",
    ]
    returned = {("new", "new", "earlier"): 1, **met}
    assert "no earlier worker ended what the new one had begun" in problems_of_meetings({("new", "new", "new"): 1})
    assert problems_of_meetings(returned, has_shared_keys=False) == problems_of_meetings(met)
