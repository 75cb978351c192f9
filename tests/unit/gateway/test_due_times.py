"""When the lines of a batch are due, and when a batch says that it is expected."""

from typing import Any

import pytest

from headrace_gateway.batch.due_times import DueTimes
from headrace_gateway.batch.record import Batch, BatchRecord, Committed, window_seconds


def batch_of(status: str = "in_progress", *, done: int = 0, **fields: Any) -> Batch:
    record = BatchRecord(
        id="batch_a",
        key="k",
        tenant=None,
        best_priority=0,
        models=None,
        endpoint="/v1/responses",
        input_file_id="file-a",
        completion_window="2h",
        created_at=1000,
        expires_at=8200,
        metadata=None,
        output_seconds=60,
        secret="s",
    )
    segments = {"0": Committed(completed=done, failed=0)}
    return Batch(record, status, times={"in_progress": 1100}, total=10, segments=segments, **fields)


def test_the_lines_of_a_batch_are_due_in_turn_and_the_last_one_at_the_end_of_its_window() -> None:
    due = DueTimes(100.0, 200.0, total=3)
    assert [due.next() for _ in range(4)] == [140, 170, 200, 200]
    due = DueTimes(0.0, 20_600.0, total=2)
    assert [due.next() for _ in range(2)] == [10_600, 20_600]


def test_the_lines_of_a_resumed_batch_are_due_after_those_that_are_answered() -> None:
    due = DueTimes(100.0, 200.0, total=3, done=1)
    assert [due.next() for _ in range(2)] == [170, 200]


def test_a_batch_is_expected_at_the_end_of_its_window_until_a_line_is_answered() -> None:
    assert batch_of("validating").expected_at(1010.0) == 8200
    assert batch_of().expected_at(1200.0) == 8200


def test_a_batch_is_expected_by_the_speed_of_its_lines_but_never_after_its_window() -> None:
    assert batch_of(done=4).expected_at(1300.0) == 1600  # 50 s a line
    assert batch_of(done=1).expected_at(2100.0) == 8200
    assert batch_of(done=4).expected_at(1000.0) == 1000  # its replica's clock is ahead of this one's
    assert batch_of(done=4).shape(1300.0)["expected_at"] == 1600


@pytest.mark.parametrize("status", ["completed", "failed", "expired", "cancelled"])
def test_an_ended_batch_is_not_expected_any_more(status: str) -> None:
    assert batch_of(status, done=4).expected_at(1300.0) is None


def test_the_window_soonest_lasts_a_day() -> None:
    assert window_seconds("soonest") == 86_400
    assert window_seconds("Soonest") is None
