"""The chunks of a chat, in order."""

import json
from typing import Any

import pytest

from headrace_broker import ChunkEvent, EndEvent, StartEvent, StreamEvent, Usage
from headrace_broker.results import ErrorInfo, TokenLogprob
from headrace_gateway.requests.call import ChatOptions, Function
from unit.gateway.recorded import joined, read_answer

START = StartEvent("1-0", 1, worker="w", prompt_tokens=5, prompt_tail="")
USAGE = Usage(5, 0, 3)


async def written(options: ChatOptions, *entries: StreamEvent) -> list[dict[str, Any]]:
    return [json.loads(data) for data, _ in await read_answer(options, entries)]


def parts(chunks: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any], str | None]]:
    return [(part["index"], part["delta"], part["finish_reason"]) for chunk in chunks for part in chunk["choices"]]


async def test_roles_come_first_then_texts_then_each_finish_alone_and_usage_last() -> None:
    chunks = await written(
        ChatOptions(n=2, include_usage=True),
        START,
        ChunkEvent("1-1", 1, 1, 1, [1], "b"),
        ChunkEvent("1-2", 1, 2, 0, [2], ""),  # the text is held back
        StartEvent("2-2", 2, worker="other", prompt_tokens=5, prompt_tail=""),
        ChunkEvent("2-3", 2, 3, 0, [3], "a", finish_reason="stop", stop_reason="x"),
        ChunkEvent("2-4", 2, 4, 1, [4], "", finish_reason="length"),
        EndEvent("2-5", 2, 4, "stop", USAGE),
    )
    assert parts(chunks) == [
        (0, {"role": "assistant", "content": ""}, None),
        (1, {"role": "assistant", "content": ""}, None),
        (1, {"content": "b"}, None),
        (0, {"content": "a"}, None),
        (0, {}, "stop"),
        (1, {}, "length"),
    ]
    assert [chunk["choices"][0].get("stop_reason") for chunk in chunks[-3:-1]] == ["x", None]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 6
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 8
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1


async def test_an_error_ends_the_stream_after_the_chunks_so_far() -> None:
    failed = EndEvent("1-2", 1, 1, "error", None, ErrorInfo("engine_error", "it failed"))
    text, error = (await written(ChatOptions(include_usage=True), START, ChunkEvent("1-1", 1, 1, 0, [1], "a"), failed))[
        1:
    ]
    assert text["choices"][0]["delta"] == {"content": "a"}
    assert error["error"]["message"] == "it failed"


async def test_without_include_usage_no_chunk_has_usage() -> None:
    last = ChunkEvent("1-1", 1, 1, 0, [1], "a", finish_reason="stop")
    chunks = await written(ChatOptions(), START, last, EndEvent("1-2", 1, 1, "stop", USAGE))
    assert not any("usage" in chunk for chunk in chunks)
    assert parts(chunks)[-1] == (0, {}, "stop")


async def test_log_probabilities_have_bytes_alternatives_and_no_infinity() -> None:
    half = TokenLogprob(7, -float("inf"), 9, "", b"\xf0\x9f")
    first, second = TokenLogprob(1, -0.5, 1, "a", b"a"), TokenLogprob(2, -1.5, 2, "b", b"b")
    options = ChatOptions(logprobs=1, return_token_ids=True)
    entry = ChunkEvent("1-1", 1, 1, 0, [7], "", [[half, first, second]], finish_reason="stop")
    chunks = await written(options, START, entry, EndEvent("1-2", 1, 1, "stop", USAGE))
    kept = chunks[1]["choices"][0]
    assert (kept["delta"], kept["token_ids"]) == ({"content": ""}, [7])
    (token,) = kept["logprobs"]["content"]
    assert token == {
        "token": "bytes:\\xf0\\x9f",
        "logprob": -9999.0,
        "bytes": [0xF0, 0x9F],
        "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
    }
    named = await written(
        ChatOptions(logprobs=0, tokens_as_ids=True), START, entry, EndEvent("1-2", 1, 1, "stop", USAGE)
    )
    (token,) = named[1]["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["top_logprobs"]) == ("token_id:7", [])


@pytest.mark.parametrize(("choice", "reason"), [("auto", "tool_calls"), ("required", "tool_calls"), ("named", "stop")])
async def test_a_call_after_reasoning_has_its_own_fields_and_finish_reason(choice: Any, reason: str) -> None:
    options = ChatOptions(
        include_usage=True,
        tool_parser="hermes",
        reasoning_parser="think",
        tools=(Function(name="f"),),
        tool_choice=choice,
    )
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    chunks = await written(
        options,
        START,
        ChunkEvent("1-2", 1, 2, 0, [1, 2], "<think>hm"),
        ChunkEvent("1-3", 1, 3, 0, [3], "</think>" + call[:30]),
        ChunkEvent("1-4", 1, 4, 0, [4], call[30:], finish_reason="stop"),
        EndEvent("1-5", 1, 4, "stop", Usage(5, 0, 4)),
    )
    message = joined(chunks, options)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (None, "hm")
    (called,) = message["tool_calls"]
    assert called["function"]["name"] == "f"
    assert json.loads(called["function"]["arguments"]) == {"a": 1}
    assert parts(chunks)[-1] == (0, {}, reason)
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] >= 2
