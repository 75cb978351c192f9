"""The headers by which a worker finds the next request of a conversation."""

from typing import Any

import pytest

from headrace_broker.client.submission import prepare
from headrace_broker.errors import InvalidRequestError

SYSTEM = {"role": "system", "content": "You are a poet."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str | None, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


def headers(*messages: dict[str, Any], **options: Any) -> dict[str, Any]:
    given = {"messages": list(messages)} if messages else {}
    return dict(prepare({**given, **options}, default_model="m").headers)  # type: ignore[arg-type,typeddict-item]


def test_each_turn_continues_the_conversation_of_the_turn_before_it() -> None:
    first = headers(SYSTEM, user("a"))
    second = headers(SYSTEM, user("a"), answer("b"), user("c"))
    third = headers(SYSTEM, user("a"), answer("b"), user("c"), answer("d"), user("e"))
    assert "continues" not in first
    assert second["continues"] == first["conversation"]
    assert third["continues"] == second["conversation"]
    assert len({each["conversation"] for each in (first, second, third)}) == 3
    assert first["prefix"] == second["prefix"] == third["prefix"]
    assert len(first["conversation"]) == 16


def test_conversations_with_one_system_prompt_are_not_alike() -> None:
    one, other = (headers(SYSTEM, user(text), answer("b"), user("c")) for text in ("a", "x"))
    assert one["prefix"] == other["prefix"]
    assert one["continues"] != other["continues"]


def test_the_results_of_tools_continue_the_request_that_called_them() -> None:
    asked = headers(SYSTEM, user("a"))
    calls = [{"id": str(number), "type": "function", "function": {"name": "f", "arguments": "{}"}} for number in "12"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in calls]
    answered = headers(SYSTEM, user("a"), answer(None, tool_calls=calls), *results)
    assert answered["continues"] == asked["conversation"]


def test_an_answer_that_its_client_changes_or_begins_does_not_matter() -> None:
    asked = headers(user("a"))
    begun = headers(user("a"), answer("begin"), continue_final_message=True, add_generation_prompt=False)
    assert "continues" not in begun
    assert begun["conversation"] == asked["conversation"]
    for text in ("b", "other", None):
        assert headers(user("a"), answer(text), user("c"))["continues"] == asked["conversation"]


def test_an_answer_that_is_asked_for_again_continues_the_same_conversation() -> None:
    once, again = (headers(user("a"), answer("b"), user("c")) for _ in range(2))
    edited = headers(user("a"), answer("b"), user("d"))
    assert once["continues"] == again["continues"] == edited["continues"]
    assert once["conversation"] == again["conversation"] != edited["conversation"]


@pytest.mark.parametrize("options", [{"tenant": "t"}, {"cache_salt": "s"}, {"lora": "l"}, {"tools": [{"a": 1}]}])
def test_a_conversation_of_which_nothing_is_cached_for_the_other_is_another(options: dict[str, Any]) -> None:
    assert headers(user("a"))["conversation"] != headers(user("a"), **options)["conversation"]


def test_messages_are_not_alike_because_their_texts_are_joined() -> None:
    joined = headers(user("a"), user("b")), headers(user("ab")), headers(user("a\nuser\n1\nb"))
    assert len({each["conversation"] for each in joined}) == 3


def test_a_prompt_without_messages_has_no_conversation_unless_a_key_names_it() -> None:
    assert headers(prompt="x").keys() == {"wire", "enqueued_at", "prefix"}
    named = headers(prompt="x", prefix_key="k")
    assert named["continues"] == named["conversation"] == named["prefix"]


def test_a_chat_with_a_key_is_found_by_its_messages() -> None:
    keyed = headers(user("a"), answer("b"), user("c"), prefix_key="k")
    assert keyed["continues"] == headers(user("a"))["conversation"]


@pytest.mark.parametrize("option", ["tenant", "cache_salt", "prefix_key"])
def test_a_value_that_is_no_text_is_refused_by_name(option: str) -> None:
    with pytest.raises(InvalidRequestError, match=option):
        headers(user("a"), **{option: 10**5000})
