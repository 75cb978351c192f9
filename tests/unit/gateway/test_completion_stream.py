"""The chunks of a text completion: echo, log-probabilities of the prompt, and hidden tokens."""

import json
from typing import Any

import pytest
from openai.types import Completion

from headrace_broker import ChunkEvent, EndEvent, StartEvent, StreamEvent, Usage
from headrace_broker.results import TokenLogprob
from headrace_gateway.requests.call import CompletionOptions
from unit.gateway.recorded import joined, read_answer

START = StartEvent("1-0", 1, worker="w", prompt_tokens=3)
PROMPT: list[list[TokenLogprob] | None] = [
    None,
    [TokenLogprob(2, -0.5, 1, "b", b"b")],
    [TokenLogprob(3, -float("inf"), 9, "c", b"c")],
]
FIRST = ChunkEvent("1-1", 1, 1, 1, [8], "y", [[TokenLogprob(8, -0.5, 1, "y", b"y")]], finish_reason="stop")
SECOND = ChunkEvent(
    "1-2", 1, 2, 0, [9], "x", [[TokenLogprob(9, -1.0, 1, "x", b"x")]], finish_reason="length", prompt_logprobs=PROMPT
)
END = EndEvent("1-3", 1, 2, "stop", Usage(3, 0, 2))


async def written(options: CompletionOptions, *entries: StreamEvent) -> list[dict[str, Any]]:
    return [json.loads(data) for data, _ in await read_answer(options, entries or (START, FIRST, SECOND, END))]


def texts(chunks: list[dict[str, Any]]) -> list[tuple[int, str, str | None]]:
    return [(part["index"], part["text"], part["finish_reason"]) for chunk in chunks for part in chunk["choices"]]


async def test_an_echo_is_the_first_text_of_every_choice() -> None:
    chunks = await written(CompletionOptions(n=2, echo=True, prompts=("abc",)))
    assert texts(chunks) == [
        (0, "abc", None),
        (1, "abc", None),
        (1, "y", None),
        (1, "", "stop"),
        (0, "x", None),
        (0, "", "length"),
    ]
    assert not any("usage" in chunk or "prompt_logprobs" in chunk for chunk in chunks)


@pytest.mark.parametrize("prompt", ["abc", None])
async def test_an_echo_with_log_probabilities_scores_the_prompt_before_the_answer(prompt: str | None) -> None:
    options = CompletionOptions(n=2, echo=True, prompts=(prompt,), logprobs=0, include_usage=True)
    chunks = await written(options)
    plain = joined(chunks, options)
    first = "a" if prompt else ""
    for choice, answer, score in zip(plain["choices"], ["x", "y"], [-1.0, -0.5], strict=True):
        assert choice["text"] == f"{first}bc{answer}"
        shape = choice["logprobs"]
        assert shape["tokens"] == [first, "b", "c", answer]
        assert shape["token_logprobs"] == [None, -0.5, -9999.0, score]
        assert shape["top_logprobs"] == [None, {"b": -0.5}, {"c": -9999.0}, {answer: score}]
        assert shape["text_offset"] == [0, *(len(first) + each for each in (0, 1, 2))]
        shape["token_logprobs"][0] = 0.0  # the one null that the SDK's types lack
        shape["top_logprobs"][0] = {}
    Completion.model_validate(plain, strict=True)
    assert plain["usage"]["completion_tokens"] == 2


async def test_with_max_tokens_0_only_the_prompt_is_shown() -> None:
    entry = ChunkEvent("1-1", 1, 1, 0, [9], "x", SECOND.logprobs, finish_reason="stop", prompt_logprobs=PROMPT)
    end = EndEvent("1-2", 1, 1, "stop", Usage(3, 0, 1))
    options = CompletionOptions(
        echo=True, prompts=("abc",), logprobs=1, drop_generated=True, include_usage=True, return_token_ids=True
    )
    chunks = await written(options, START, entry, end)
    assert texts(chunks) == [(0, "abc", None), (0, "", "length")]
    plain = joined(chunks, options)
    assert plain["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]
    assert (plain["usage"]["completion_tokens"], plain["usage"]["total_tokens"]) == (0, 3)
    assert "token_ids" not in plain["choices"][0]


@pytest.mark.parametrize("echo", [True, False])
async def test_prompt_logprobs_are_sent_once_even_if_another_choice_is_first(echo: bool) -> None:
    chunks = await written(CompletionOptions(n=2, prompt_logprobs=True, echo=echo, prompts=("abc",)))
    assert texts(chunks)[:2] == ([(0, "abc", None), (1, "abc", None)] if echo else [(1, "y", None), (1, "", "stop")])
    (scores,) = [part["prompt_logprobs"] for chunk in chunks for part in chunk["choices"] if "prompt_logprobs" in part]
    assert scores == [
        None,
        {"2": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}},
        {"3": {"logprob": -9999.0, "rank": 9, "decoded_token": "c"}},
    ]


async def test_a_second_start_adds_no_chunk() -> None:
    taken_over = StartEvent("2-1", 2, worker="other", prompt_tokens=3)
    last = ChunkEvent("2-2", 2, 2, 0, [9], "x", finish_reason="length")
    end = EndEvent("2-3", 2, 2, "length", Usage(3, 0, 2))
    chunks = await written(CompletionOptions(), START, ChunkEvent("1-1", 1, 1, 0, [8], "y"), taken_over, last, end)
    assert texts(chunks) == [(0, "y", None), (0, "x", None), (0, "", "length")]
