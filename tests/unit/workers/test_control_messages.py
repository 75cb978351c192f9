"""Control messages are checked before they run."""

from typing import Any

import pytest

from headrace_workers.celery.control_messages import ControlMessage, ControlMessageError

REPLIES = "reply.celery.pidbox"


def read(**changes: Any) -> ControlMessage:
    message = {"method": "ping", "arguments": {}, "destination": None, "pattern": None, "matcher": None}
    return ControlMessage.read(message | changes, REPLIES)


def test_a_message_of_celery_is_read() -> None:
    reply_to = {"exchange": REPLIES, "routing_key": "7a5b"}
    command = read(arguments={"a": 1}, destination=["w@h"], reply_to=reply_to, ticket="t")
    assert (command.method, command.arguments, command.routing_key, command.ticket) == ("ping", {"a": 1}, "7a5b", "t")
    assert command.is_for("w@h")
    assert not command.is_for("other@h")
    assert not read(destination=["x", {}, 5]).is_for("w@h")
    assert read(arguments=None, destination=[]).is_for("w@h")


def test_a_glob_chooses_workers() -> None:
    assert read(pattern="w@*", matcher="glob").is_for("w@h")
    assert not read(pattern="x@*", matcher="glob").is_for("w@h")


def test_a_regular_expression_is_refused() -> None:
    with pytest.raises(ControlMessageError, match="glob"):
        read(pattern="(a+)+$", matcher="pcre").is_for("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!")


@pytest.mark.parametrize(
    "changes",
    [
        {"method": None},
        {"method": 5},
        {"method": "x" * 300},
        {"method": "two\nlines"},
        {"arguments": [1]},
        {"arguments": {1: 2}},
        {"destination": 5},
        {"destination": "w@h"},
        {"pattern": 5},
        {"pattern": "*a" * 200},
        {"reply_to": 5},
        {"reply_to": {"exchange": "", "routing_key": "headrace.m"}},
        {"reply_to": {"exchange": "headrace.m", "routing_key": "headrace.m"}},
        {"reply_to": {"exchange": REPLIES, "routing_key": ["x"]}},
        {"ticket": {}},
    ],
    ids=str,
)
def test_a_message_that_celery_never_sends_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ControlMessageError):
        read(**changes)


@pytest.mark.parametrize("body", [None, 5, "ping", ["ping"]])
def test_a_message_that_is_not_a_map_is_refused(body: Any) -> None:
    with pytest.raises(ControlMessageError):
        ControlMessage.read(body, REPLIES)
