"""Bodies of `/v1/decisions` become the queue's arguments."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_broker import RegisteredModel
from headrace_broker.decisions import Decided
from headrace_broker.results import Usage
from headrace_gateway.decisions.fields import read_decision
from headrace_gateway.errors import ApiError

MODEL = RegisteredModel("m", 64, 1.0, "w", tasks=("generate", "decide"))
QUESTION = {"type": "predicate", "instructions": "It is old."}
CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "old"}


def given(**body: Any) -> Any:
    return read_decision({"model": "m", "input": "the mill", "questions": [QUESTION], **body}, model=MODEL).given


def problem(**body: Any) -> tuple[str | None, str]:
    with pytest.raises(ApiError) as caught:
        given(**body)
    return caught.value.param, str(caught.value)


def test_a_text_stays_a_text() -> None:
    assert given() == {"input": "the mill", "questions": [QUESTION]}


def test_messages_and_calls_become_a_chat() -> None:
    developer = {"role": "developer", "content": [{"type": "input_text", "text": "Be strict."}]}
    chat = given(input=[developer, {"role": "user", "content": "Look."}, CALL, OUTPUT])["input"]
    assert chat[0] == {"role": "system", "content": "Be strict."}
    assert [message["role"] for message in chat] == ["system", "user", "assistant", "tool"]


def test_json_parts_become_text() -> None:
    part = {"type": "input_json", "data": {"wheel": [1, None]}}
    texts = [{"type": "input_text", "text": "Look:"}, part]
    assert given(input=[{"role": "user", "content": texts}])["input"][0]["content"] == 'Look:\n{"wheel":[1,null]}'
    question = {"type": "predicate", "instructions": texts}
    assert given(questions=[question])["questions"][0]["instructions"] == 'Look:\n{"wheel":[1,null]}'


def test_custom_tool_calls_are_calls() -> None:
    custom = {"type": "custom_tool_call", "call_id": "c", "name": "sh", "input": "ls"}
    out = {"type": "custom_tool_call_output", "call_id": "c", "output": "mill.txt"}
    chat = given(input=[custom, out])["input"]
    assert chat[0]["tool_calls"][0]["function"] == {"name": "sh", "arguments": '{"input":"ls"}'}
    assert chat[1]["content"] == "mill.txt"


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"input": ""}, "input", "input must be a string of at least 1 characters, got 0"),
        ({"input": []}, "input", "input must be a string or a list of at least one item, got an empty list"),
        ({"input": None}, "input", "input must be given"),
        ({"questions": None}, "questions", "questions must be given"),
        ({"questions": {"a": QUESTION}}, "questions", "questions must be a list of questions, got a map"),
        ({"questions": [{**QUESTION, "type": "x"}]}, "questions[0].type", "must be one of predicate, choice, score"),
        ({"questions": [{**QUESTION, "instructions": []}]}, "questions[0].instructions", "at least 1 characters"),
        ({"input": [OUTPUT]}, "input[0].call_id", "must be the call_id of an earlier call, got 'c'"),
        ({"messages": []}, None, ""),
        ({"state": "x"}, "state", "state is not supported: send it in input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
            "input[0].content[0].type",
            "must be input_text or output_text, got 'input_image'",
        ),
        (
            {"questions": [{**QUESTION, "instructions": [{"type": "input_image", "image_url": "data:"}]}]},
            "questions[0].instructions[0].type",
            "must be input_text or input_json, got 'input_image'",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_json", "data": 7}]}]},
            "input[0].content[0].data",
            "must be a map or a list of maps, got 7",
        ),
    ],
)
def test_wrong_bodies_are_refused_with_the_field(body: dict[str, Any], param: str | None, told: str) -> None:
    if param is None:
        assert given(**body)  # an empty list asks for nothing
        return
    assert problem(**body)[0] == param
    assert told in problem(**body)[1]


def test_the_answer_has_openai_s_form() -> None:
    body = read_decision({"model": "m", "input": "x", "questions": [QUESTION]}, model=MODEL)
    answer = {"type": "predicate", "name": None, "probability": 0.5}
    assert body.answer(Decided([answer], Usage(9, 4, 1), ["r1"]), "decision-r1") == {
        "model": "m",
        "answers": [answer],
        "usage": {
            "input_tokens": 9,
            "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 4},
            "output_tokens": 1,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 10,
        },
    }
