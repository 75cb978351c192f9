"""The rules of a decision: every problem at once, with its path."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_wire.questions import decide_problems

PREDICATE = {"type": "predicate", "instructions": "It is old."}


def problems(**given: Any) -> list[str]:
    return decide_problems({"input": "the mill", "questions": [PREDICATE], **given})


def test_a_text_and_a_chat_are_inputs() -> None:
    assert problems() == []
    assert problems(input=[{"role": "user", "content": "the mill"}], model="m", lora="a") == []


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"input": ""}, "input must be a string of at least 1 characters, got 0"),
        ({"input": 7}, "input must be a text or a list of messages, got 7"),
        ({"input": [{"role": "user"}]}, "input[0].content is required"),
        ({"input": []}, "input must hold 1 to 4096 chat messages, got 0"),
        ({"messages": []}, "unknown key 'messages'"),
        ({"questions": []}, "questions must hold 1 to 400 questions, got 0"),
        ({"questions": [PREDICATE] * 401}, "questions must hold 1 to 400 questions, got 401"),
        ({"questions": {}}, "questions must be a list of questions, got a map"),
        ({"questions": [1]}, "questions[0] must be a map, got 1"),
    ],
)
def test_wrong_arguments_are_named(given: dict[str, Any], found: str) -> None:
    assert problems(**given) == [found]


def test_missing_arguments_are_named() -> None:
    assert decide_problems({}) == ["input must be given", "questions must be given"]


def test_input_and_questions_have_a_limit_together() -> None:
    half = "a" * (2 * 2**20)
    (found,) = problems(input=half, questions=[{**PREDICATE, "instructions": half + "a"}])
    assert found.startswith("input with questions must be at most 4194304 bytes of UTF-8, got ")


def test_every_problem_of_each_question_is_named() -> None:
    twice = {"type": "score", "instructions": "", "levels": [{"label": "a"}, {"label": "a"}]}
    one = {"type": "choice", "instructions": "x", "choices": [{"value": "a"}], "seed": 1}
    same = {"type": "choice", "instructions": "x", "choices": [{"value": True}, {"value": "true"}]}
    assert problems(questions=[twice, one, {"type": "noul"}, same, {"type": "score", "instructions": "x"}]) == [
        "questions[0].instructions must be a string of at least 1 characters, got 0",
        "questions[0].levels[1].label is the same as that of questions[0].levels[0]: each must be unique",
        "questions[1] must hold only type, instructions, name, choices, got 'seed'",
        "questions[1].choices must hold 2 to 255 options, got 1",
        "questions[2].type must be one of predicate, choice, score, got 'noul'",
        "questions[4].levels is required",
    ]
