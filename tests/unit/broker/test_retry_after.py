"""When a full queue will have room again."""

import pytest

from headrace_broker.queue_levels import QueueLevels, retry_after


def levels(ready: int, age: float | None) -> QueueLevels:
    return QueueLevels(ready={0: ready}, leased=0, run_out=0, dead={}, oldest_age_seconds=age)


@pytest.mark.parametrize(
    ("ready", "age", "excess", "expected"),
    [(100, 50.0, 10, 5.0), (100, 50.0, 1, 1.0), (100, None, 1, None), (0, None, 1, None), (10, 1e6, 10, 3600.0)],
)
def test_a_queue_moves_as_fast_as_it_moved_while_its_first_request_waited(
    ready: int, age: float | None, excess: int, expected: float | None
) -> None:
    assert retry_after(levels(ready, age), excess) == expected
