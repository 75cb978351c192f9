"""A job publishes chunks, makes engine requests, and is rebuilt from a stream."""

from __future__ import annotations

from typing import Any

from headrace_broker.packing import unpack
from headrace_broker.results import ErrorInfo, TokenLogprob, Usage
from headrace_broker.streams.events import ChunkEvent, EndEvent, StartEvent, StreamEvent
from headrace_engine.api.input_processor import InputProcessor
from headrace_engine.requests.outputs import CompletionOutput, Logprob, RequestOutput
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_workers.requests.generate_job import (
    GenerateJob,
    recorded_choices,
    recorded_prompt_logprobs,
    recorded_result,
)
from unit.workers.fakes import MODEL, FakeCeleryRequest, FakeTimer, FakeTokenizer


def make_job(n: int = 1, attempt: int = 1, entries: list[StreamEvent] | None = None) -> GenerateJob:
    processor = InputProcessor(MODEL, FakeTokenizer())  # type: ignore[arg-type]
    request = processor.process("r1", "abc", SamplingParams(n=n, seed=5, max_tokens=9))
    return GenerateJob(
        celery_request=FakeCeleryRequest(),
        request=request,
        attempt=attempt,
        choices=recorded_choices(entries or [], n),
        queued_at=None,
    )


def output(token_ids: list[int], text: str, index: int = 0, **more: Any) -> CompletionOutput:
    return CompletionOutput(index=index, text=text, token_ids=token_ids, **more)


def chunk(offset: int, token_ids: list[int], text: str, index: int = 0, **more: Any) -> ChunkEvent:
    return ChunkEvent(f"1-{offset}", 1, offset, index, token_ids, text, **more)


def test_offsets_count_the_tokens_of_all_choices() -> None:
    job = make_job(n=2)
    writes = [
        job.take(output([10], "a")),
        job.take(output([11, 12], "bc", index=1)),
        job.take(output([13], "d", finish_reason="stop", stop_reason="d")),
    ]
    assert [write.entry_id for write in writes] == ["1-1", "1-3", "1-4"]
    last = unpack(writes[-1].data)
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "d")
    assert job.num_tokens == 4
    assert job.num_unfinished == 1
    end = job.end("stop")
    assert (end.entry_id, end.type) == ("1-5", "end")
    assert unpack(end.data)["usage"]["completion_tokens"] == 4


def test_an_earlier_attempt_is_resumed_choice_by_choice() -> None:
    entries: list[StreamEvent] = [
        StartEvent("1-0", 1, "w"),
        chunk(2, [10, 11], "ab"),
        chunk(3, [12], "c", index=1, finish_reason="length"),
        StartEvent("2-0", 2, "w"),
        chunk(4, [13], "d"),
    ]
    job = make_job(n=2, attempt=3, entries=entries)
    assert job.num_tokens == 4
    assert job.num_unfinished == 1
    [todo] = job.core_requests()
    assert todo is job.request.choices[0]
    assert todo.output_token_ids == [10, 11, 13]
    write = job.take(output([14], "e"))
    assert (write.entry_id, write.entry_before) == ("3-5", "3-4")
    assert unpack(write.data)["choice_tokens"] == 4
    result = job.result()
    assert [choice.text for choice in result.outputs] == ["abde", "c"]
    assert result.outputs[1].finish_reason == "length"


def test_the_tokens_of_the_only_choice_are_in_the_entry_id_alone() -> None:
    assert "choice_tokens" not in unpack(make_job().take(output([10], "a")).data)


def test_a_sent_request_does_not_grow_with_the_job() -> None:
    job = make_job()
    job.take(output([10], "a"))
    [todo] = job.core_requests()
    job.take(output([11], "b"))
    assert todo.output_token_ids == [10]


def test_logprobs_continue_after_the_stream_with_the_sampled_token_first() -> None:
    job = make_job(entries=[chunk(1, [10], "a", logprobs=[[TokenLogprob(10, -0.5, 1, "a")]])])
    candidates = {
        12: Logprob(logprob=-2.0, rank=3, decoded_token="c"),
        11: Logprob(logprob=-0.1, rank=1, decoded_token="b"),
    }
    write = job.take(output([12], "c", logprobs=[candidates]))
    assert unpack(write.data)["logprobs"] == [[[12, -2.0, 3, "c"], [11, -0.1, 1, "b"]]]
    assert job.result().outputs[0].logprobs == [
        [TokenLogprob(10, -0.5, 1, "a")],
        [TokenLogprob(12, -2.0, 3, "c"), TokenLogprob(11, -0.1, 1, "b")],
    ]


def test_the_bytes_of_a_part_of_a_character_reach_stream_and_result() -> None:
    job = make_job()
    part = Logprob(logprob=-0.5, rank=1, decoded_token="", bytes=b"\xe6")
    assert unpack(job.take(output([12], "", logprobs=[{12: part}])).data)["logprob_bytes"] == [[[0xE6]]]
    logprobs = job.result().outputs[0].logprobs
    assert logprobs is not None and logprobs[0][0].bytes == b"\xe6"


def test_prompt_logprobs_go_with_the_first_chunk_of_choice_0_and_into_the_result() -> None:
    job = make_job(n=2)
    entries: list[dict[int, Logprob] | None] = [
        None,
        {11: Logprob(logprob=-1.0, rank=2, decoded_token="b")},
    ]
    news = RequestOutput(request_id="r1", prompt="ab", prompt_token_ids=[10, 11], prompt_logprobs=entries)
    other, first = output([12], "c", index=1), output([13], "d")
    assert "prompt_logprobs" not in unpack(job.take(other, news).data)
    assert unpack(job.take(first, news).data)["prompt_logprobs"] == [None, [[11, -1.0, 2, "b"]]]
    assert job.result().prompt_logprobs == [None, [TokenLogprob(11, -1.0, 2, "b")]]


def test_prompt_logprobs_of_an_earlier_attempt_are_kept() -> None:
    logprobs = [None, [TokenLogprob(11, -1.0, 2, "b")]]
    entries: list[StreamEvent] = [
        chunk(1, [10], "a"),
        chunk(2, [11], "b", prompt_logprobs=logprobs),
        chunk(3, [12], "c"),
    ]
    assert recorded_prompt_logprobs(entries) == logprobs
    ended = EndEvent("1-4", 1, 3, "stop")
    assert recorded_result("r1", entries, ended).prompt_logprobs == logprobs
    assert recorded_prompt_logprobs([]) is None


def test_entries_of_unknown_choices_are_ignored() -> None:
    assert [choice.token_ids for choice in recorded_choices([chunk(1, [10], "a", index=7)], 2)] == [[], []]


def test_the_result_of_an_ended_stream_equals_its_entries() -> None:
    error = ErrorInfo("expired", "too late")
    ended = EndEvent("1-4", 1, 3, "expired", Usage(3, 0, 3), error)
    result = recorded_result("r1", [chunk(1, [10], "a", index=1), chunk(3, [11, 12], "bc")], ended)
    assert [(output.index, output.text) for output in result.outputs] == [(0, "bc"), (1, "a")]
    assert (result.usage, result.error) == (Usage(3, 0, 3), error)
    assert recorded_result("r1", [], ended).outputs == []


def test_timers_are_cancelled_once() -> None:
    job = make_job()
    timer = FakeTimer(0, lambda: None)
    job.timers.append(timer)
    job.cancel_timers()
    assert timer.cancelled
    assert job.timers == []
