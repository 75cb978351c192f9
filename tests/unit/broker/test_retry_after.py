"""The estimate of when a full queue has room again."""

import pytest

from headrace_broker.queue.levels import QueueLevels, retry_after


def levels(ready: int, age: float | None) -> QueueLevels:
    return QueueLevels(ready={0: ready}, leased=0, run_out=0, dead={}, oldest_age_seconds=age)


@pytest.mark.parametrize(
    ("ready", "age", "excess", "expected"),
    [(100, 50.0, 10, 5.0), (100, 50.0, 1, 1.0), (100, None, 1, None), (0, None, 1, None), (10, 1e6, 10, 3600.0)],
)
def test_the_estimate_assumes_the_speed_at_which_the_queue_moved_so_far(
    ready: int, age: float | None, excess: int, expected: float | None
) -> None:
    assert retry_after(levels(ready, age), excess) == expected
