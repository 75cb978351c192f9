"""The events of a response follow from its envelope and entries, in the API's order, and add up to the object."""

import json
from typing import Any

import openai
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent

from headrace_broker import ChunkEvent, EndEvent, StartEvent, StreamEvent, Usage
from headrace_broker.results import ErrorInfo, TokenLogprob
from headrace_gateway.errors import ApiError
from headrace_gateway.requests.call import ResponseOptions
from headrace_gateway.responses.fields import read_response
from unit.gateway.bodies import model
from unit.gateway.recorded import entry_lists, joined, read_answer

EVENT: Any = pydantic.TypeAdapter(ResponseStreamEvent)
START = StartEvent("1-0", 1, worker="w", prompt_tokens=5, prompt_tail="")
USAGE = Usage(5, 2, 4)
TOOL = {"type": "function", "name": "f"}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def form_of(**fields: Any) -> ResponseOptions:
    """The options of a request to a model that reasons and calls tools."""
    options = read_response(
        {"model": "m", "input": "hello", **fields},
        model=model(tool_parser="hermes", reasoning_parser="think", thinking="enable_thinking"),
        lora=None,
    ).options
    assert isinstance(options, ResponseOptions)
    return options


@st.composite
def any_options(draw: st.DrawFn) -> ResponseOptions:
    fields: dict[str, Any] = {"background": draw(st.booleans())}
    if draw(st.booleans()):
        fields["tools"] = [TOOL]
    if draw(st.booleans()):
        fields["reasoning"] = {"summary": "auto"}
    if draw(st.booleans()):
        fields["top_logprobs"] = 1
    return form_of(**fields)


@st.composite
def answers(draw: st.DrawFn) -> tuple[ResponseOptions, list[StreamEvent]]:
    options = draw(any_options())
    return options, draw(entry_lists(n=1, has_logprobs=options.logprobs is not None))


async def events_of(
    options: ResponseOptions, *entries: StreamEvent, sizes: Any = (), after: int | None = None
) -> list[Any]:
    return [json.loads(data) for data, _ in await read_answer(options, entries, sizes, after)]


@given(answers(), st.lists(st.integers(1, 4)))
async def test_a_reader_that_resumes_after_any_number_gets_the_same_remaining_events(
    answer: tuple[ResponseOptions, list[StreamEvent]], sizes: list[int]
) -> None:
    options, entries = answer
    whole = [data for data, _ in await read_answer(options, entries)]
    for cut in range(-1, len(whole)):
        assert [data for data, _ in await read_answer(options, entries, sizes, cut)] == whole[cut + 1 :]
    with pytest.raises(ApiError, match="this answer has no event"):
        await read_answer(options, entries, sizes, len(whole))


@given(answers())
async def test_every_event_parses_in_the_sdk_and_the_events_are_in_order(
    answer: tuple[ResponseOptions, list[StreamEvent]],
) -> None:
    options, entries = answer
    events = await events_of(options, *entries)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event, strict=True)
    kinds = [event["type"].removeprefix("response.") for event in events]
    begins = ["created", "queued", "in_progress"] if options.background else ["created", "in_progress"]
    assert kinds[: len(begins)] == begins
    assert kinds[-1] in ("completed", "incomplete", "failed")
    assert set(kinds) & {"created", "queued", "in_progress", "completed", "incomplete", "failed"} == {
        *begins,
        kinds[-1],
    }
    check_items(events, options)


def check_items(events: list[dict[str, Any]], options: ResponseOptions) -> None:
    """Each item is opened, written and closed before the next one, and is whole in the last event."""
    final = events[-1]["response"]
    open_item: dict[str, Any] | None = None
    texts: list[str] = []
    done: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert open_item is None
            assert (event["output_index"], event["item"]["status"]) == (len(done), "in_progress")
            open_item, texts = event["item"], []
        elif kind == "output_item.done":
            assert open_item is not None
            item = event["item"]
            assert {name: item[name] for name in ("id", "type")} == {name: open_item[name] for name in ("id", "type")}
            parts = item.get("summary") or item.get("content")
            assert "".join(texts) == (item["arguments"] if item["type"] == "function_call" else parts[0]["text"])
            done.append(item)
            open_item = None
        elif kind.endswith(".delta"):
            assert open_item is not None
            assert (event["item_id"], event["output_index"]) == (open_item["id"], len(done))
            assert event["delta"] or event.get("logprobs")
            texts.append(event["delta"])
        elif kind.endswith(("_text.done", "arguments.done")):
            assert "".join(texts) == event.get("text", event.get("arguments"))
    assert open_item is None
    assert done == final["output"]
    assert all(item["status"] == "completed" for item in done[:-1])
    if final["status"] == "completed":
        assert done
        assert done[-1]["status"] == "completed"
    assert any("summary_text" in event["type"] for event in events) <= options.has_summary


@given(answers())
async def test_the_object_is_what_the_sdk_accumulates(answer: tuple[ResponseOptions, list[StreamEvent]]) -> None:
    options, entries = answer
    events = await events_of(options, *entries)
    folded = joined(events, options)
    assert folded == events[-1]["response"]
    Response.model_validate(folded, strict=True)
    state: Any = ResponseStreamState(input_tools=[], text_format=openai.omit)
    for event in events:
        if event["type"] != "error":
            state.handle_event(EVENT.validate_python(event))
    end = entries[-1]
    assert isinstance(end, EndEvent)
    text = "".join(entry.text for entry in entries if isinstance(entry, ChunkEvent))
    if not options.tools and end.error is None and "think>" not in text:
        assert "".join(part["text"] for item in folded["output"] for part in item["content"]) == text
    statuses = {None: ("completed", "incomplete"), "cancelled": ("cancelled",)}
    assert folded["status"] in statuses.get(end.error and end.error.code, ("failed",))


async def test_reasoning_text_and_calls_are_consecutive_items() -> None:
    events = await events_of(
        form_of(tools=[TOOL]),
        START,
        ChunkEvent("1-1", 1, 1, 0, [1], "<think>hm"),
        ChunkEvent("1-2", 1, 2, 0, [2], "</think>so"),
        StartEvent("2-2", 2, worker="other", prompt_tokens=5, prompt_tail=""),
        ChunkEvent("2-3", 2, 3, 0, [3], CALL[:30]),
        ChunkEvent("2-4", 2, 4, 0, [4], CALL[30:], finish_reason="stop"),
        EndEvent("2-5", 2, 4, "stop", USAGE),
    )
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    response = events[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    assert json.loads(response["output"][2]["arguments"]) == {"a": 1}
    assert response["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 9,
    }


async def test_an_answer_truncated_by_max_output_tokens_is_incomplete() -> None:
    cut = ChunkEvent("1-1", 1, 1, 0, [1], "<tool_call>" + CALL[11:40], finish_reason="length")
    events = await events_of(form_of(tools=[TOOL]), START, cut, EndEvent("1-2", 1, 1, "length", USAGE))
    response = events[-1]["response"]
    assert (events[-1]["type"], response["status"]) == ("response.incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["incomplete"]


async def test_an_answer_without_text_has_an_empty_message() -> None:
    empty = ChunkEvent("1-1", 1, 1, 0, [1], "", finish_reason="stop")
    events = await events_of(form_of(), START, empty, EndEvent("1-2", 1, 1, "stop", USAGE))
    (item,) = events[-1]["response"]["output"]
    assert item["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("engine_error", "server_error"),
        ("expired", "server_error"),
        ("quota_exceeded", "rate_limit_exceeded"),
        ("context_length_exceeded", "invalid_prompt"),
        ("of a newer worker", "server_error"),
    ],
)
async def test_a_failure_is_an_error_event_and_then_the_failed_response(code: str, told: str) -> None:
    failed = EndEvent("1-2", 1, 1, "error", None, ErrorInfo(code, "it failed"))
    events = await events_of(form_of(), START, ChunkEvent("1-1", 1, 1, 0, [1], "a"), failed)
    error, last = events[-2:]
    assert (error["type"], error["code"], error["message"]) == ("error", code, "it failed")
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": told, "message": f"it failed ({code})"}
    assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]


async def test_a_cancelled_response_ends_with_an_event_that_the_sdk_knows() -> None:
    cancelled = EndEvent("1-2", 1, 1, "cancelled", None, ErrorInfo("cancelled", "cancelled"))
    events = await events_of(form_of(), START, ChunkEvent("1-1", 1, 1, 0, [1], "a"), cancelled)
    response = events[-1]["response"]
    assert (events[-1]["type"], response["status"], response["error"]) == ("response.incomplete", "cancelled", None)
    assert [item["status"] for item in response["output"]] == ["incomplete"]


async def test_logprobs_of_held_back_text_are_sent_with_the_next_text() -> None:
    def token(number: int) -> list[list[TokenLogprob]]:
        return [[TokenLogprob(number, -float("inf"), 1, f"t{number}", b"t")]]

    events = await events_of(
        form_of(include=["message.output_text.logprobs"]),
        START,
        ChunkEvent("1-1", 1, 1, 0, [1], "", token(1)),
        ChunkEvent("1-2", 1, 2, 0, [2], "ab", token(2)),
        ChunkEvent("1-3", 1, 3, 0, [3], "", token(3), finish_reason="stop"),
        EndEvent("1-4", 1, 3, "stop", USAGE),
    )
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [[each["token"] for each in event["logprobs"]] for event in deltas] == [["t1", "t2"], ["t3"]]
    (item,) = events[-1]["response"]["output"]
    assert [each["logprob"] for each in item["content"][0]["logprobs"]] == [-9999.0] * 3


async def test_logprobs_of_reasoning_are_not_in_the_message() -> None:
    def token(number: int) -> list[list[TokenLogprob]]:
        return [[TokenLogprob(number, float("-inf"), 1, f"t{number}", b"t")]]

    events = await events_of(
        form_of(include=["message.output_text.logprobs"]),
        START,
        ChunkEvent("1-1", 1, 1, 0, [1], "<thi", token(1)),
        ChunkEvent("1-2", 1, 2, 0, [2], "nk>hm", token(2)),
        ChunkEvent("1-3", 1, 3, 0, [3], "</thi", token(3)),
        ChunkEvent("1-4", 1, 4, 0, [4], "nk>", token(4)),
        ChunkEvent("1-5", 1, 5, 0, [5], "so", token(5), finish_reason="stop"),
        EndEvent("1-6", 1, 5, "stop", USAGE),
    )
    _, message = events[-1]["response"]["output"]
    assert [each["token"] for each in message["content"][0]["logprobs"]] == ["t5"]
