"""A short seeded cut of `python -m chaos.batch`."""

from pathlib import Path

import pytest

from chaos.batch import WORKLOADS, both

pytestmark = pytest.mark.rotated_file


@pytest.mark.timeout(900)
@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_whatever_breaks_every_line_of_a_batch_has_one_answer(workload: str, tmp_path: Path) -> None:
    accounts = both(tmp_path, WORKLOADS[workload], lines=120, seed=3, num_faults=5)
    assert [problem for account in accounts for problem in account.problems] == []
    assert [(account.missing, account.twice, account.answers + account.errors) for account in accounts] == [
        (0, 0, 120)
    ] * 2
    for account in accounts:
        assert sum(account.faults.values()) >= 3, "the faults came when nothing ran"
