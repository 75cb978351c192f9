"""What is shown of dead letters, whose messages are untrusted."""

import json
from typing import Any

import msgspec
import pytest

from headrace_broker import DeadLetter
from headrace_gateway.errors import ApiError
from headrace_gateway.page.overview import pick, summary


def letter(packed: bytes = b"1", **headers: Any) -> DeadLetter:
    body = json.dumps({"headers": {"id": "a", "task": "t", **headers}, "body": "the prompt"}).encode()
    return DeadLetter("poison", "headrace.m", 3, body, at=5.0, packed=packed)


def test_a_summary_contains_nothing_of_the_message() -> None:
    told = summary(letter(tenant="acme", enqueued_at=2.5, secret="the prompt"))
    assert told["reason"] == "poison"
    assert (told["queue"], told["deliveries"], told["at"]) == ("headrace.m", 3, 5.0)
    assert (told["tenant"], told["enqueued_at"]) == ("acme", 2.5)
    assert b"prompt" not in msgspec.json.encode(told)


@pytest.mark.parametrize("value", [["the prompt"], {"a": "the prompt"}, None, 1.5, True, "\ud800", "a" * 10_000, ""])
def test_headers_that_are_not_valid_names_are_left_out(value: object) -> None:
    told = msgspec.json.decode(msgspec.json.encode(summary(letter(tenant=value, enqueued_at=str(value)))))
    assert told["tenant"] is None
    assert told["enqueued_at"] is None


def test_dead_letters_are_selected_once_each_in_the_given_order() -> None:
    first, second, third = letter(b"1"), letter(b"2"), letter(b"3")
    named = [third.letter_id, first.letter_id, third.letter_id]
    assert pick([first, second, third], named) == [third, first]


def test_if_a_dead_letter_is_missing_it_is_named_and_none_is_selected() -> None:
    with pytest.raises(ApiError, match="no such dead letter: gone") as error:
        pick([letter()], [letter().letter_id, "gone"])
    assert error.value.status == 404
