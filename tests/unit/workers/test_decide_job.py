"""A decision is answered by the log-probabilities of labels, and is rebuilt from a stream."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace_broker.packing import unpack
from headrace_broker.results import ErrorInfo, TokenLogprob, Usage
from headrace_broker.streams.events import ChunkEvent, StreamEvent
from headrace_engine.api.decide import decision_request
from headrace_engine.api.input_processor import InputProcessor
from headrace_engine.requests.outputs import CompletionOutput, Logprob, RequestOutput
from headrace_engine.text.decision_plan import DecisionPlan
from headrace_monitoring.metrics import Publication
from headrace_workers.preparation.intake import RefusedError
from headrace_workers.requests.decide_job import DecideJob, recorded_readings
from unit.workers.fakes import MODEL, FakeCeleryRequest, FakeTokenizer

PREDICATE = {"type": "predicate", "instructions": "It is old.", "name": "old"}
CHOICE = {"type": "choice", "instructions": "What is it?", "choices": [{"value": "mill"}, {"value": "lake"}]}
PLAN = DecisionPlan([10, 11, 12], [[13], [14, 15]], [[[20], [21]], [[20, 30], [20, 31]]])
"""The labels of the second question have two tokens, of which the first is the same."""


def make_job(entries: list[StreamEvent] | None = None) -> DecideJob:
    processor = InputProcessor(MODEL, FakeTokenizer())  # type: ignore[arg-type]
    request = decision_request(processor, "r1", PLAN, 0, 0.0, "", None)
    return DecideJob(
        celery_request=FakeCeleryRequest(),
        request=request,
        attempt=1,
        choices=recorded_readings(entries or [], PLAN),
        queued_at=None,
        questions=[PREDICATE, CHOICE],
        plan=PLAN,
    )


def read(index: int, shares: dict[int, float], cached: int = 0) -> RequestOutput:
    logprobs = {token: Logprob(math.log(share), 1) for token, share in shares.items()}
    completion = CompletionOutput(index, "", [next(iter(shares))], 0.0, [logprobs], "length")
    return RequestOutput("r1", None, [10], None, [completion], finished=False, num_cached_tokens=cached)


def chunk(index: int, offset: int, shares: dict[int, float]) -> ChunkEvent:
    found = [[TokenLogprob(token, math.log(share), 1, None) for token, share in shares.items()]]
    return ChunkEvent(f"1-{offset}", 1, offset, index, [next(iter(shares))], "", found, "length")


ALL = [read(0, {20: 0.3, 21: 0.1}, cached=2), read(1, {20: 0.5}, cached=3), read(2, {30: 0.2, 31: 0.6}, cached=3)]


def publish(job: DecideJob, *outputs: RequestOutput) -> list[Any]:
    return [write for output in outputs for write in job.publish(output, 1.0, Publication())]


def test_each_question_has_a_prompt_of_its_own() -> None:
    requests = make_job().core_requests()
    assert [request.prompt_token_ids for request in requests] == [
        [10, 11, 12, 13],
        [10, 11, 12, 14, 15],
        [10, 11, 12, 14, 15, 20],
    ]
    assert [request.sampling_params.logprob_token_ids for request in requests] == [[20, 21], [20], [30, 31]]
    assert len({request.request_id for request in requests}) == 3


def test_one_request_is_sent_before_the_others() -> None:
    job = make_job()
    job.unsent = job.core_requests()
    assert job.num_sendable == 1
    job.unsent = job.unsent[1:]
    assert job.num_sendable == 0
    publish(job, ALL[0])
    assert job.num_sendable == 2


def test_the_end_has_the_answers_and_counts_the_input_once() -> None:
    job = make_job()
    writes = publish(job, *ALL)
    assert [write.entry_id for write in writes] == ["1-1", "1-2", "1-3"]
    assert job.num_unfinished == 0
    end = unpack(job.end("stop").data)
    predicate, choice = end["answers"]
    assert predicate == {"type": "predicate", "name": "old", "probability": pytest.approx(0.75)}
    assert (choice["choice"], choice["confidence"]) == ("lake", pytest.approx(0.75))
    assert job.usage() == Usage(3 + 1 + 2, 2, 3)
    assert job.result().to_wire()["answers"] == end["answers"]


def test_the_tokens_that_are_published_are_those_that_the_tenant_pays() -> None:
    job, publication = make_job(), Publication()
    for output in ALL:
        job.publish(output, 1.0, publication)
    usage = job.usage()
    assert publication.num_prompt_tokens + publication.num_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_resumed_job_reads_only_what_is_missing_and_has_the_same_answers() -> None:
    whole, resumed = make_job(), make_job([chunk(0, 1, {20: 0.3, 21: 0.1}), chunk(2, 2, {30: 0.2, 31: 0.6})])
    publish(whole, *ALL)
    (todo,) = resumed.core_requests()
    assert todo.prompt_token_ids == [10, 11, 12, 14, 15]
    resumed.unsent = [todo]
    assert resumed.num_sendable == 1
    publish(resumed, ALL[1])
    assert resumed.result().answers == whole.result().answers


@pytest.mark.parametrize(
    "entry",
    [chunk(3, 1, {20: 0.3}), chunk(-1, 1, {20: 0.3}), chunk(0, 1, {20: 0.3}), ChunkEvent("1-1", 1, 1, 1, [20], "")],
)
def test_readings_of_another_plan_are_not_continued(entry: ChunkEvent) -> None:
    with pytest.raises(RefusedError, match="send it again under a new id"):
        make_job([entry])


def test_a_failed_job_has_no_answers() -> None:
    job = make_job()
    publish(job, ALL[0])
    end = unpack(job.end("cancelled", ErrorInfo("cancelled", "no")).data)
    assert "answers" not in end
    assert job.result(ErrorInfo("cancelled", "no")).to_wire()["answers"] is None
