"""Chunks are a function of the envelope and the entries: the same bytes for every reader and replica."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from headrace_broker import ChunkEvent, EndEvent, StreamEvent
from headrace_gateway.answers.reader import Cursor
from headrace_gateway.errors import ApiError
from headrace_gateway.requests.call import AnswerOptions, ChatOptions, CompletionOptions, Function
from unit.gateway.recorded import PROMPT, PROMPT_TOKENS, entry_lists, joined, read_answer

PARSED: Any = {
    "tool_parser": "hermes",
    "reasoning_parser": "think",
    "tools": (Function(name="f"),),
    "tool_choice": "auto",
}


@st.composite
def any_options(draw: st.DrawFn) -> AnswerOptions:
    options: dict[str, Any] = {"n": draw(st.integers(1, 3)), "include_usage": draw(st.booleans())}
    options["continuous_usage"] = options["include_usage"] and draw(st.booleans())
    options["logprobs"] = draw(st.sampled_from([None, 0, 2]))
    options["return_token_ids"] = draw(st.booleans())
    options["tokens_as_ids"] = draw(st.booleans())
    options["prompt_logprobs"] = draw(st.booleans())
    if draw(st.booleans()):
        return CompletionOptions(
            **options,
            echo=draw(st.booleans()),
            prompts=(draw(st.sampled_from([PROMPT, None])),),
            drop_generated=draw(st.integers(0, 4)) == 0,
        )
    return ChatOptions(**options, **draw(st.sampled_from([{}, PARSED])))


@st.composite
def answers(draw: st.DrawFn) -> tuple[AnswerOptions, list[StreamEvent]]:
    options = draw(any_options())
    return options, draw(entry_lists(n=options.n, has_logprobs=options.logprobs is not None))


def error_of(entries: list[StreamEvent]) -> bool:
    assert isinstance(entries[-1], EndEvent)
    return entries[-1].error is not None


@given(answers())
async def test_a_reader_that_rejoins_after_any_event_gets_the_same_rest(
    answer: tuple[AnswerOptions, list[StreamEvent]],
) -> None:
    options, entries = answer
    whole = await read_answer(options, entries)
    cursors = [cursor for _, cursor in whole]
    assert cursors == sorted(set(cursors))
    for cut, cursor in enumerate(cursors, 1):
        assert await read_answer(options, entries, after=Cursor.parse(str(cursor), param="id")) == whole[cut:]


@given(answers(), st.lists(st.integers(1, 4)))
async def test_the_batches_in_which_entries_are_read_change_no_byte(
    answer: tuple[AnswerOptions, list[StreamEvent]], sizes: list[int]
) -> None:
    options, entries = answer
    assert await read_answer(options, entries, sizes) == await read_answer(options, entries)


@given(answers(), st.integers(0, 20), st.integers(0, 5))
async def test_an_unknown_cursor_is_refused(
    answer: tuple[AnswerOptions, list[StreamEvent]], offset: int, number: int
) -> None:
    options, entries = answer
    whole = await read_answer(options, entries)
    cursor = Cursor(1, offset, number)
    if cursor in [each for _, each in whole]:
        behind = [each for each in whole if each[1] > cursor]
        assert await read_answer(options, entries, after=cursor) == behind
    else:
        with pytest.raises(ApiError, match="this answer has no event"):
            await read_answer(options, entries, after=cursor)


@given(answers())
async def test_every_chunk_parses_in_the_sdk_and_none_is_empty(answer: tuple[AnswerOptions, list[StreamEvent]]) -> None:
    options, entries = answer
    written = [json.loads(data) for data, _ in await read_answer(options, entries)]
    if error_of(entries):
        assert written.pop()["error"]["message"] == "it failed"
    shape = ChatCompletionChunk if isinstance(options, ChatOptions) else Completion
    for chunk in written:
        if isinstance(options, ChatOptions):
            ChatCompletionChunk.model_validate(chunk, strict=True)
        assert chunk["object"] == ("chat.completion.chunk" if shape is ChatCompletionChunk else "text_completion")
        assert len(chunk["choices"]) == 1 or chunk["usage"] is not None
    if not isinstance(options, ChatOptions):
        return
    # a prompt's log-probabilities may be all that an entry has; they go with the first chunk
    parts = [part | {"scores": chunk.get("prompt_logprobs")} for chunk in written for part in chunk["choices"]]
    assert [part["index"] for part in parts[: options.n]] == list(range(options.n))
    assert all(part["delta"] == {"role": "assistant", "content": ""} for part in parts[: options.n])
    for part in parts[options.n :]:
        assert part["delta"] or part["finish_reason"]
        extras = [part.get(name) for name in ("logprobs", "token_ids", "scores")]
        assert part["delta"] != {"content": ""} or any(extras)
        assert "role" not in part["delta"]


@given(answers())
async def test_the_whole_answer_equals_what_the_sdk_accumulates(
    answer: tuple[AnswerOptions, list[StreamEvent]],
) -> None:
    options, entries = answer
    if error_of(entries) or not options.include_usage:
        return
    chunks = [json.loads(data) for data, _ in await read_answer(options, entries)]
    plain = joined(chunks, options)
    offset = max(entry.offset for entry in entries if isinstance(entry, ChunkEvent))
    is_dropped = isinstance(options, CompletionOptions) and options.drop_generated
    assert plain["usage"]["total_tokens"] == PROMPT_TOKENS + (0 if is_dropped else offset)
    scores = [each["prompt_logprobs"] for each in (plain, *plain["choices"]) if "prompt_logprobs" in each]
    assert [len(each) for each in scores] == [PROMPT_TOKENS] * options.prompt_logprobs
    echoed = ""
    if isinstance(options, CompletionOptions) and options.echo:
        echoed = options.prompts[0] or PROMPT[2:]  # no log-probability has the text of the first token
    for index, choice in enumerate(plain["choices"]):
        mine = [entry for entry in entries if isinstance(entry, ChunkEvent) and entry.index == index]
        tokens = [token for entry in mine for token in entry.token_ids]
        if is_dropped:
            mine, tokens = [], []
        assert choice.get("token_ids", tokens) == tokens
        text = "".join(entry.text for entry in mine)
        if isinstance(options, CompletionOptions):
            assert choice["text"] == echoed + text
        elif options.tool_parser is None:
            assert choice["message"]["content"] == text
        if options.logprobs is not None:
            shape = (choice["logprobs"] or {}).get("content" if isinstance(options, ChatOptions) else "tokens", [])
            assert len(shape) == len(tokens) + (PROMPT_TOKENS if echoed else 0)
    if isinstance(options, ChatOptions):
        ChatCompletion.model_validate(plain, strict=True)
        state: Any = ChatCompletionStreamState()
        for chunk in chunks:
            state.handle_chunk(ChatCompletionChunk.model_validate(chunk, strict=True))
        for mine, theirs in zip(plain["choices"], state.current_completion_snapshot.choices, strict=True):
            assert (mine["message"]["content"] or "") == (theirs.message.content or "")
            calls = [each.function.arguments for each in theirs.message.tool_calls or []]
            assert [each["function"]["arguments"] for each in mine["message"].get("tool_calls", [])] == calls
            assert mine["finish_reason"] == theirs.finish_reason
    else:
        for choice in plain["choices"] if echoed else ():
            if choice["logprobs"] is not None:  # the one null that the SDK's types lack
                assert choice["logprobs"]["token_logprobs"].pop(0) is None
                assert choice["logprobs"]["top_logprobs"].pop(0) is None
        Completion.model_validate(plain, strict=True)


async def test_prompt_logprobs_are_sent_even_if_another_choice_is_first() -> None:
    options = ChatOptions(n=2, prompt_logprobs=True)
    entries: list[StreamEvent] = [
        ChunkEvent("1-1", 1, 1, 1, [1], "a", finish_reason="stop"),
        ChunkEvent("1-2", 1, 2, 0, [1], "", finish_reason="stop", prompt_logprobs=[None]),
        EndEvent("1-3", 1, 2, "stop"),
    ]
    chunks = [json.loads(data) for data, _ in await read_answer(options, entries)]
    assert [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk] == [[None]]


@pytest.mark.parametrize(
    "text", ["", "1-2", "1-2.", "-1-2.0", "1-2.0 ", "٣-1.0", "1-2.0\n", "1" * 20 + "-1.0", "[DONE]"]
)
def test_a_malformed_cursor_is_refused(text: str) -> None:
    with pytest.raises(ApiError) as raised:
        Cursor.parse(text, param="starting_after")
    assert (raised.value.status, raised.value.code) == (400, "invalid_cursor")
