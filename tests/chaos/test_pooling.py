"""A short seeded cut of `python -m chaos.pooling`: four faults, of which a short run takes two."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from chaos import faults
from chaos.pooling import PoolingHarness, pooling_site, summary
from chaos.recorder import Chunk, Computed, RowsLog, finished_again

_FAULTS = (faults.kill_worker, faults.kill_engine, faults.freeze_worker, faults.restart_redis)


@pytest.fixture
def chosen(request: pytest.FixtureRequest) -> Sequence[faults.Fault]:
    """All faults, or in a short run one after which jobs are continued, and one that its seed chooses."""
    if not request.config.getoption("short"):
        return _FAULTS
    draw = random.Random(request.config.getoption("randomly_seed", 0))
    return [faults.kill_worker, draw.choice(_FAULTS[1:])]


@pytest.mark.timeout(600)
def test_whatever_breaks_each_row_comes_once_and_finished_ones_are_not_computed_again(
    chosen: Sequence[faults.Fault], tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    site, record = pooling_site(tmp_path, logs)
    with site:
        harness = PoolingHarness(site, record, seed=30)
        harness.learn()
        rounds = harness.run(len(chosen), report=lambda _: None, chosen=chosen)
    assert [problem for done in rounds for problem in done.problems] == []
    total = summary(rounds)[-1]
    assert (total["lost"], total["wrong"], total["finished_again"]) == (0, 0, 0)
    assert total["resumed"] > 0, "the faults came when nothing ran"
    assert total["computed"] >= total["rows"] > 0


def test_a_row_that_was_found_or_written_counts_as_finished() -> None:
    log = RowsLog([(1, 0), (2, 4)], [Chunk(1, 0, 4), Chunk(2, 4, 2)], b"", {})
    arrivals = [10.0, 20.0]
    unfinished = [Computed(1, 0, 9.0), Computed(2, 4, 11.0), Computed(2, 4, 19.0), Computed(1, 5, 30.0)]
    assert finished_again(unfinished, log, arrivals) == 0
    assert finished_again([Computed(2, 3, 12.0)], log, arrivals) == 1, "the second worker has found this row"
    assert finished_again([Computed(2, 5, 21.0)], log, arrivals) == 1, "the second worker has written this row"
