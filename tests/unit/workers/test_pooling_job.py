"""A pooling job publishes rows in entries of limited size, and continues after the rows of earlier attempts."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_broker.packing import unpack
from headrace_broker.results import Usage
from headrace_broker.streams.events import RowsEvent, StartEvent
from headrace_engine.core.outputs import EngineCoreOutputs, PooledRows, StepStats
from headrace_engine.requests.pooling_request import PoolingCoreRequest
from headrace_monitoring.metrics import Publication
from headrace_workers.requests.engine_outputs import RowOutputs
from headrace_workers.requests.pooling_job import ENTRY_BYTES, PoolingJob
from headrace_workers.requests.token_credit import MESSAGES, STEPS, TokenCredit
from unit.workers.fakes import FakeCeleryRequest

ROW = b"\x00\x00\x80?" * 2


def make_job(count: int = 5, **more: Any) -> PoolingJob:
    inputs = [[1] * (index % 5 + 1) for index in range(count)]
    request = PoolingCoreRequest(request_id="r1", task="embed", inputs=inputs, dimensions=2, priority=3)
    job = PoolingJob(celery_request=FakeCeleryRequest(), request=request, attempt=2, queued_at=None, **more)
    job.resume([])
    return job


def rows(first: int, count: int, data: bytes | None = None, **more: Any) -> PooledRows:
    return PooledRows("r1", first, count, ROW * count if data is None else data, **more)


def publish(job: PoolingJob, output: PooledRows) -> list[str]:
    return [write.entry_id for write in job.publish(output, 0.0, Publication())]


def test_a_job_continues_after_the_rows_of_earlier_attempts() -> None:
    job = make_job()
    job.request.second_from = [0, 1, 0, 2, 0]
    job.resume([StartEvent("1-0", 1, "w"), RowsEvent("1-2", 1, 0, 2, ROW * 2), StartEvent("2-0", 2, "w")])
    assert (job.num_done, job.num_unfinished, job.num_tokens_left) == (2, 1, 3 + 4 + 5)
    [todo] = job.core_requests()
    assert (todo.inputs, todo.first, todo.second_from) == ([[1] * 3, [1] * 4, [1] * 5], 2, [0, 2, 0])
    assert (todo.dimensions, todo.priority, todo.task) == (2, 3, "embed")
    assert publish(job, rows(2, 3)) == ["2-5"]
    assert (job.num_done, job.num_unfinished, job.num_tokens_left) == (5, 0, 0)
    result = job.result()
    assert result.rows is not None
    assert result.rows.tolist() == [[1.0, 1.0]] * 5
    assert job.end("stop").entry_id == "2-6"


def test_an_entry_has_at_most_256_kib_unless_it_has_one_row() -> None:
    per_entry = ENTRY_BYTES // len(ROW)
    job = make_job(2 * per_entry + 1)
    writes = job.publish(rows(0, 2 * per_entry + 1), 0.0, Publication())
    assert [(write.entry_before, write.entry_id) for write in writes] == [
        ("2-0", f"2-{per_entry}"),
        (f"2-{per_entry}", f"2-{2 * per_entry}"),
        (f"2-{2 * per_entry}", f"2-{2 * per_entry + 1}"),
    ]
    assert [len(unpack(write.data)["bytes"]) for write in writes] == [ENTRY_BYTES, ENTRY_BYTES, len(ROW)]
    wide = make_job(2)
    huge = b"\x00" * (ENTRY_BYTES + 4)
    assert publish(wide, rows(0, 2, huge * 2)) == ["2-1", "2-2"]


def test_the_cost_is_the_tokens_after_truncation_and_the_end_names_the_cut_inputs() -> None:
    job = make_job(3, truncated=[1], labels=("no", "yes"))
    assert job.usage() == Usage(1 + 2 + 3, 0, 0)
    end = unpack(job.end("stop").data)
    assert (end["truncated"], end["labels"], end["usage"]["prompt_tokens"]) == ([1], ["no", "yes"], 6)
    assert job.result().rows is None


def read(outputs: RowOutputs, *found: PooledRows) -> list[tuple[str, bool, str | None]]:
    step = EngineCoreOutputs(outputs=[], stats=StepStats(), rows=list(found))
    return [(each.request_id, each.finished, each.error) for each in outputs.read(step, hold_back=False).outputs]


def test_rows_of_an_aborted_attempt_are_ignored() -> None:
    outputs, job = RowOutputs(), make_job()
    assert read(outputs, rows(0, 1)) == []
    outputs.expect(job)
    assert read(outputs, rows(3, 1, is_last=True)) == []
    assert read(outputs, rows(0, 1)) == [("r1", False, None)]
    assert outputs.abort("r1") == (None, ["r1"])
    assert outputs.abort("r1") is None
    assert read(outputs, rows(0, 1)) == []
    outputs.expect(job)
    assert read(outputs, PooledRows("r1", 0, 0, b"", True, "no")) == [("r1", True, "no")]
    assert len(outputs) == 0


@pytest.mark.parametrize(("sizes", "most"), [([100] * 40, 40), ([16_384] * 40, 1)])
def test_messages_are_taken_by_their_tokens(sizes: list[int], most: int) -> None:
    credit = TokenCredit(1024)
    assert credit.messages(0, 0) == 1  # before any message is known
    for size in sizes:
        credit.took(size)
    assert credit.messages(0, 0) == most
    assert credit.messages(STEPS * 1024 - 1, MESSAGES) == 1
    assert credit.messages(STEPS * 1024, MESSAGES) == 0


@pytest.mark.parametrize(("size", "messages"), [(50, 20), (1000, 1), (5000, 0)])
def test_the_messages_of_one_step_are_counted_by_their_tokens(size: int, messages: int) -> None:
    credit = TokenCredit(1024)
    for _ in range(60):
        credit.took(size)
    assert credit.step_messages == messages


def test_a_few_messages_are_taken_one_by_one_behind_a_long_one() -> None:
    credit = TokenCredit(1024)
    credit.took(50)
    assert [credit.messages(100_000, count) for count in range(1, MESSAGES + 1)] == [1] * (MESSAGES - 1) + [0]
