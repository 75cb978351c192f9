"""The message of a decision, and its answer."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_broker import InvalidRequestError, RequestFailedError
from headrace_broker.client.decision_calls import decision_call
from headrace_broker.decisions import DecideRequest
from headrace_broker.results import ErrorInfo, Usage
from headrace_broker.streams.events import ChunkEvent, EndEvent

QUESTIONS = [{"type": "predicate", "instructions": "It is old."}, {"type": "predicate", "instructions": "It is wet."}]


def test_the_message_says_how_many_slots_the_questions_take() -> None:
    call = decision_call("the mill", QUESTIONS, {"tenant": "t", "lora": "a"}, "m")
    (submission,) = call.submissions
    assert submission.request.task_name == "headrace.decide"
    assert submission.request.to_kwargs() == {"input": "the mill", "questions": QUESTIONS, "lora": "a"}
    assert submission.headers["choices"] == 2
    assert submission.headers["tenant"] == "t"


def test_inputs_that_begin_alike_have_the_same_prefix() -> None:
    def prefix(given: Any, model: str = "m") -> str:
        return str(decision_call(given, QUESTIONS, {}, model).submissions[0].headers["prefix"])

    assert prefix("the mill") == prefix([{"role": "user", "content": "the mill"}])
    assert len({prefix("the mill"), prefix("a lake"), prefix("the mill", "other")}) == 3


def test_a_wrong_call_names_every_problem() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decision_call("", [], {"prompt": "x", "priority": 10}, None)
    assert list(caught.value.problems) == [
        "unknown option 'prompt'",
        "input must be a string of at least 1 characters, got 0",
        "questions must hold 1 to 400 questions, got 0",
        "model must be given, in the call or when the client is created",
        "priority must be an integer from 0 (first) to 9, got 10",
    ]


def test_a_request_survives_the_wire() -> None:
    request = DecideRequest.parse({"input": [{"role": "user", "content": "x"}], "questions": QUESTIONS, "model": "m"})
    assert DecideRequest.parse(request.to_kwargs()) == request
    assert "x" not in repr(request) and "old" not in repr(request)


def test_the_answer_is_that_of_the_end() -> None:
    call = decision_call("the mill", QUESTIONS, {}, "m")
    answer = call.answer(["r1"])
    answer.add("r1", ChunkEvent("1-1", 1, 1, 0, [5], ""))
    answers = ({"type": "predicate", "name": None, "probability": 0.5},) * 2
    answer.add("r1", EndEvent("1-3", 1, 2, "stop", Usage(9, 1, 2), answers=answers))
    decided = answer.whole()
    assert (decided.answers, decided.usage, decided.request_ids) == ([*answers], Usage(9, 1, 2), ["r1"])


def test_a_failed_decision_raises() -> None:
    answer = decision_call("the mill", QUESTIONS, {}, "m").answer(["r1"])
    with pytest.raises(RequestFailedError, match="expired: too late"):
        answer.add("r1", EndEvent("1-1", 1, 0, "expired", None, ErrorInfo("expired", "too late")))
