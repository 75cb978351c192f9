"""The rules of the pooling tasks: each names every wrong input with its index, value and limit."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from headrace_wire.chat import MAX_TEXT_BYTES
from headrace_wire.pooling import MAX_INPUTS, POOLING, PoolingTask, pooling_problems

TEXTS = ["river", "lake"]
GOOD: dict[PoolingTask, dict[str, list[Any]]] = {
    "embed": {
        "input": ["river", TEXTS, [[101, 7]], [[2**31 - 1]], ["x"] * MAX_INPUTS],
        "prompt_name": ["query"],
        "prompt": ["query: ", ""],
        "dimensions": [1, 2**31 - 1],
        "normalize": [True, False],
        "truncate": ["error", "start", "end"],
        "max_tokens": [1],
        "add_special_tokens": [True, False],
        "model": ["minilm"],
    },
    "score": {
        "query": ["q"],
        "queries": ["q", ["q"], TEXTS],
        "documents": ["d", TEXTS],
        "activation": [True, False],
        "truncate": ["error", "start", "end"],
        "max_tokens": [1],
        "model": ["minilm"],
    },
    "classify": {
        "input": ["river", TEXTS, ["x", ["premise", "hypothesis"]], [[1, 2]]],
        "activation": [True, False],
        "truncate": ["error", "start", "end"],
        "max_tokens": [1],
        "model": ["minilm"],
    },
}
BAD: dict[PoolingTask, dict[str, list[Any]]] = {
    "embed": {
        "input": [7, {}, [], "", ["x", ""], [[]], [[1], []], [[-1]], [[2**31]], [["a", "b"]], ["x", [1]], [1, 2],
                  [["a", "b", "c"]], [True], [[True]], [1.5], [["a", 1]], ["x"] * (MAX_INPUTS + 1)],
        "prompt_name": ["", 7, "a\x00", "x" * 201],
        "prompt": [7, "x" * 65_537],
        "dimensions": [0, -1, 1.5, "3", True, 2**31],
        "normalize": [1, "yes"],
        "truncate": ["left", True, ""],
        "max_tokens": [0, "3"],
        "add_special_tokens": [0],
        "model": ["", 7],
    },
    "score": {
        "query": ["", 7, ["q"]],
        "queries": ["", [], [[1]], ["q", ""]],
        "documents": ["", [], [{"text": "d"}], [["a", "b"]]],
        "activation": [0],
        "truncate": ["left"],
        "max_tokens": [0],
        "model": [""],
    },
    "classify": {
        "input": [7, [], ["", "x"], [["a", ""]], [["a"]], ["x", [1]]],
        "activation": [None, 1],
        "truncate": ["left"],
        "max_tokens": [0],
        "model": [""],
    },
}  # fmt: skip
REST: dict[PoolingTask, dict[str, Any]] = {
    "embed": {"input": ["x"]},
    "score": {"query": "q", "documents": ["d", "e"]},
    "classify": {"input": ["x"]},
}


def cases(values: dict[PoolingTask, dict[str, list[Any]]]) -> list[Any]:
    return [
        pytest.param(task, name, value, id=f"{task}-{name}-{str(value)[:30]}")
        for task, fields in values.items()
        for name, listed in fields.items()
        for value in listed
    ]


def test_every_field_of_every_task_is_tested() -> None:
    for values in (GOOD, BAD):
        assert {task: set(fields) for task, fields in values.items()} == {task: set(POOLING[task]) for task in POOLING}


@pytest.mark.parametrize(("task", "name", "value"), cases(GOOD))
def test_rule_and_schema_accept_a_value_inside_the_limits(task: PoolingTask, name: str, value: Any) -> None:
    rest = dict(REST[task])
    if name == "queries":
        del rest["query"]
    assert pooling_problems(task, {**rest, name: value}) == []
    assert Draft202012Validator(POOLING[task][name].schema).is_valid(value)


@pytest.mark.parametrize(("task", "name", "value"), cases(BAD))
def test_rule_and_schema_refuse_a_value_outside_the_limits(task: PoolingTask, name: str, value: Any) -> None:
    problems = pooling_problems(task, {**REST[task], name: value})
    assert any(problem.startswith(name) for problem in problems), problems
    assert not Draft202012Validator(POOLING[task][name].schema).is_valid(value)


def test_all_wrong_inputs_are_named_at_once() -> None:
    given = {"input": ["a", {}, "", [1, -7], [1.5]], "dimensions": 0, "truncate": "left", "top_k": 3, "images": []}
    assert pooling_problems("embed", given) == [
        "unknown key 'top_k': the answer has the scores of all documents: sort them, or use Client.rerank",
        "unknown key 'images': only texts and token ids are supported",
        "input[1] must be text or a list of token ids, got a map",
        "input[2] must not be empty",
        "input[3][1] must be at least 0 and at most 2147483647, got -7",
        "input[4] must be text or a list of token ids, got a list",
        "dimensions must be at least 1 and at most 2147483647, got 0",
        "truncate must be one of error, start, end, got 'left'",
    ]


def test_many_wrong_inputs_are_counted() -> None:
    problems = pooling_problems("embed", {"input": [""] * 100})
    assert problems[7:] == ["input[7] must not be empty", "input has 92 more problems of this kind"]


def test_counts_and_kinds_are_named() -> None:
    assert pooling_problems("embed", {"input": ["x"] * 3000}) == [
        "input must hold 1 to 2048 texts or lists of token ids, got 3000"
    ]
    assert pooling_problems("embed", {"input": ["x", [1]]}) == [
        "input must hold inputs of one kind, got texts and lists of token ids"
    ]
    assert pooling_problems("score", {"queries": ["a", "b", "c"], "documents": ["d", "e"]}) == [
        "queries has 3 entries, documents 2: both must have as many, or queries one"
    ]
    assert pooling_problems("score", {}) == [
        "exactly one of query, queries must be given, got none",
        "documents must be given",
    ]
    assert pooling_problems("embed", {"input": ["x"], "prompt": "q", "prompt_name": "q"}) == [
        "prompt must be absent when prompt_name is given"
    ]
    assert pooling_problems("embed", {"input": [[1]], "prompt": "q", "add_special_tokens": True}) == [
        "prompt must be absent when input holds token ids: put its tokens into each input",
        "add_special_tokens must be absent when input holds token ids: they are the whole input",
    ]
    for task in ("embed", "classify"):
        assert pooling_problems(task, {}) == ["input must be given"]  # type: ignore[arg-type]


def test_the_texts_together_have_a_limit() -> None:
    half = "x" * (MAX_TEXT_BYTES // 2)
    assert pooling_problems("embed", {"input": [half, half]}) == []
    assert pooling_problems("embed", {"input": [half, half + "y"]}) == [
        f"input must have at most {MAX_TEXT_BYTES} bytes of UTF-8 together, got {MAX_TEXT_BYTES + 1}"
    ]


def test_the_keys_of_another_task_are_refused_with_its_name() -> None:
    assert pooling_problems("embed", {"input": ["x"], "documents": ["d"], "sampling_params": {}}) == [
        "unknown key 'documents': the task headrace.score takes it",
        "unknown key 'sampling_params': the task headrace.generate takes it",
    ]
    assert "unknown key 'input': give query or queries, and documents" in pooling_problems("score", {"input": "x"})
