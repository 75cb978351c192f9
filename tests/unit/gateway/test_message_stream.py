"""Anthropic's events: their order and content, the same bytes for every reader and replica."""

import json
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from headrace_broker import ChunkEvent, EndEvent, StartEvent, StreamEvent, Usage
from headrace_broker.results import ErrorInfo
from headrace_gateway.answers.complete_answer import input_of
from headrace_gateway.answers.reader import Cursor
from headrace_gateway.requests.call import Function, MessageOptions
from unit.gateway.recorded import PROMPT_TOKENS, entry_lists, joined, read_answer

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
PARSED: Any = {"tool_parser": "hermes", "reasoning_parser": "think", "tools": (Function(name="f"),)}
START = StartEvent("1-0", 1, worker="w", prompt_tokens=5, prompt_tail="")
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@st.composite
def answers(draw: st.DrawFn) -> tuple[MessageOptions, list[StreamEvent]]:
    options = draw(st.sampled_from([{}, PARSED, PARSED | {"parallel_tool_calls": False}]))
    options = MessageOptions(max_tokens=draw(st.integers(1, 20)), shows_thinking=draw(st.booleans()), **options)
    return options, draw(entry_lists(n=1, has_logprobs=False))


async def written(options: MessageOptions, *entries: StreamEvent) -> list[dict[str, Any]]:
    return [json.loads(data) for data, _ in await read_answer(options, entries)]


async def message(options: MessageOptions, *entries: StreamEvent) -> dict[str, Any]:
    return joined(await written(options, *entries), options)


def last(text: str, reason: str = "stop", stop_reason: Any = None) -> list[StreamEvent]:
    """Return the whole answer of a stream with one chunk."""
    chunk = ChunkEvent("1-3", 1, 3, 0, [1, 2, 3], text, finish_reason=reason, stop_reason=stop_reason)
    return [START, chunk, EndEvent("1-4", 1, 3, reason, Usage(5, 4, 3))]


async def test_blocks_follow_each_other_and_each_is_closed() -> None:
    text = "<think>hm</think>well" + CALL + "so" + CALL
    events = await written(MessageOptions(max_tokens=9, shows_thinking=True, **PARSED), *last(text))
    blocks = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert blocks == ["thinking", "text", "tool_use", "text", "tool_use"]
    shape = [(event["type"].removeprefix("content_block_"), event["index"]) for event in events[1:-2]]
    assert [each for each in shape if each[0] != "delta"] == [
        (what, index) for index in range(5) for what in ("start", "stop")
    ]
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    assert events[0]["message"]["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
        "output_tokens_details": None,
        "server_tool_use": None,
        "cache_creation": None,
        "inference_geo": None,
        "service_tier": "standard",
    }
    assert events[-2]["usage"] == {
        "input_tokens": 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 3,
        "output_tokens_details": {"thinking_tokens": 3},
        "server_tool_use": None,
    }
    assert len({event["content_block"]["id"] for event in events if event.get("content_block", {}).get("id")}) == 2


async def test_thinking_that_was_not_asked_for_is_left_out() -> None:
    answer = await message(MessageOptions(max_tokens=9, **PARSED), *last("<think>hm</think>well"))
    assert [block["type"] for block in answer["content"]] == ["text"]


@pytest.mark.parametrize(
    ("text", "reason", "stop", "max_tokens", "told"),
    [
        ("a", "stop", None, 9, ("end_turn", None)),
        ("a", "stop", "END", 9, ("stop_sequence", "END")),
        ("a", "stop", 7, 9, ("end_turn", None)),
        ("a", "stop", "repetition", 9, ("end_turn", None)),
        ("a", "length", None, 3, ("max_tokens", None)),
        ("a", "length", None, 4, ("model_context_window_exceeded", None)),
        (CALL, "stop", None, 9, ("tool_use", None)),
        (CALL, "length", None, 3, ("max_tokens", None)),
    ],
)
async def test_stop_reasons_have_anthropics_names(
    text: str, reason: str, stop: Any, max_tokens: int, told: tuple[str, str | None]
) -> None:
    options = MessageOptions(max_tokens=max_tokens, stop_sequences=("END",), **PARSED)
    answer = await message(options, *last(text, reason, stop))
    assert (answer["stop_reason"], answer["stop_sequence"]) == told


async def test_a_truncated_call_is_kept_unchanged() -> None:
    cut = CALL[: CALL.index("1}")]
    answer = await message(MessageOptions(max_tokens=3, **PARSED), *last(cut, "length"))
    (block,) = answer["content"]
    assert block["input"] == {"INVALID_JSON": '{"a": '}
    assert [input_of(text) for text in ("", " ", "[1]", '{"a": 1}')] == [{}, {}, {"INVALID_JSON": "[1]"}, {"a": 1}]


async def test_an_anthropic_error_ends_the_stream_after_the_events_so_far() -> None:
    failed = EndEvent("1-2", 1, 1, "error", None, ErrorInfo("engine_error", "it failed"))
    events = await written(MessageOptions(max_tokens=9), START, ChunkEvent("1-1", 1, 1, 0, [1], "a"), failed)
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "it failed"}}
    assert [event["type"] for event in events[:-1]] == ["message_start", "content_block_start", "content_block_delta"]


@given(answers())
async def test_every_event_parses_in_the_sdk_whose_accumulator_gives_the_whole_message(
    answer: tuple[MessageOptions, list[StreamEvent]],
) -> None:
    options, entries = answer
    events = await written(options, *entries)
    assert isinstance(entries[-1], EndEvent)
    if entries[-1].error is not None:
        assert events.pop()["type"] == "error"
        return
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        assert event.get("delta", {}).get("text", "x")  # no delta is empty
        snapshot = accumulate_event(
            event=EVENT.validate_python(event, strict=True), current_snapshot=snapshot, json_bufs=buffers
        )
    plain = joined(events, options)
    Message.model_validate(plain, strict=True)
    theirs = snapshot.to_dict()
    for mine, other in zip(plain["content"], theirs["content"], strict=True):
        if "INVALID_JSON" not in mine.get("input", {}):  # the SDK repairs truncated JSON
            assert mine.items() <= other.items()
    assert (
        plain["usage"].items()
        >= {
            "output_tokens": theirs["usage"]["output_tokens"],
            "input_tokens": PROMPT_TOKENS,
        }.items()
    )
    assert plain["stop_reason"] == theirs["stop_reason"]
    assert plain["stop_reason"] is not None


@given(answers(), st.lists(st.integers(1, 4)))
async def test_a_reader_that_rejoins_after_any_event_gets_the_same_remaining_events(
    answer: tuple[MessageOptions, list[StreamEvent]], sizes: list[int]
) -> None:
    options, entries = answer
    whole = await read_answer(options, entries)
    assert await read_answer(options, entries, sizes) == whole
    for cut, (_, cursor) in enumerate(whole, 1):
        assert await read_answer(options, entries, sizes, after=Cursor.parse(str(cursor), param="id")) == whole[cut:]


@given(answers(), st.data())
async def test_the_message_does_not_depend_on_the_pieces_of_its_text(
    answer: tuple[MessageOptions, list[StreamEvent]], data: st.DataObject
) -> None:
    options, entries = answer
    chunks = [entry for entry in entries if isinstance(entry, ChunkEvent)]
    text, end = "".join(chunk.text for chunk in chunks), entries[-1]
    assert isinstance(end, EndEvent)
    if end.error is not None:
        return
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=5)))
    pieces = [text[begin:stop] for begin, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    total = max(chunks[-1].offset, len(pieces))
    recut: list[StreamEvent] = [entries[0]]
    for number, piece in enumerate(pieces, 1):
        is_last = number == len(pieces)
        offset = total if is_last else number
        reason = chunks[-1].finish_reason if is_last else None
        recut.append(ChunkEvent(f"1-{offset}", 1, offset, 0, [1], piece, finish_reason=reason))
    ends = EndEvent(f"1-{total + 1}", 1, total, end.finish_reason, end.usage)
    mine, theirs = await message(options, *recut, ends), await message(options, *entries)
    assert mine["content"] == theirs["content"]
    assert (mine["role"], mine["model"], mine["id"]) == (theirs["role"], theirs["model"], theirs["id"])
