"""Streams that are joined and left while a read of others is on its way."""

from unittest.mock import Mock

import msgpack

from headrace_broker.subscriber import Readers


def entry(offset: int) -> list[object]:
    data = msgpack.packb({"index": 0, "token_ids": [offset], "text": "x", "logprobs": None})
    return [f"1-{offset}".encode(), [b"type", b"chunk", b"data", data]]


def reply(*offsets: int) -> list[object]:
    return [[[b"headrace:stream:a", [entry(offset) for offset in offsets]]]]


def test_what_was_read_for_one_reader_is_not_given_to_one_that_came_meanwhile() -> None:
    readers = Readers({"a": "1-50"}, None)
    readers.commands()
    readers.remove("a")
    readers.add("a", "0-0")
    assert list(readers.received(reply(51, 52))) == []
    assert b"0-0" in [part if isinstance(part, bytes) else str(part).encode() for part in readers.commands()[0]]
    assert [event.entry_id for _, event in readers.received(reply(1, 2))] == ["1-1", "1-2"]


def test_a_stream_that_is_left_while_it_is_read_brings_nothing_more() -> None:
    readers = Readers({"a": "0-0", "b": "0-0"}, None)
    readers.commands()
    readers.remove("a")
    assert list(readers.received(reply(1))) == []
    assert readers


def begin(readers: Readers, request_id: str, abandon_after: float | None) -> None:
    """The reader reads a start, and all that is asked then is answered."""
    data = msgpack.packb({"worker": "w", "abandon_after": abandon_after})
    readers.commands()
    list(
        readers.received([[[f"headrace:stream:{request_id}".encode(), [[b"1-0", [b"type", b"start", b"data", data]]]]]])
    )
    asked(readers)


def asked(readers: Readers) -> list[str]:
    """Keys of the questions, and of the touches before them."""
    pipe = Mock()
    if readers.needs_checks():
        readers.add_checks(pipe)
    return [call.args[0] for call in pipe.method_calls]


def test_whoever_joins_silent_streams_makes_nobody_look_at_them() -> None:
    readers = Readers({"a": "0-0", "b": "0-0"}, None)
    begin(readers, "a", None)
    begin(readers, "b", None)
    readers.add("c", "0-0")
    readers.commands()
    assert list(readers.received([None])) == []
    assert asked(readers) == ["headrace:ended:c", "headrace:stream:c", "headrace:listener:c"]
    readers.commands()
    assert list(readers.received([None])) == []
    assert {key.rpartition(":")[2] for key in asked(readers)} == {"a", "b", "c"}, "all were silent for a whole wait"


def test_a_stream_that_begins_has_only_its_own_listener_touched() -> None:
    readers = Readers({"a": "0-0", "b": "0-0"}, None)
    begin(readers, "a", 30.0)
    readers.add("c", "0-0")
    data = msgpack.packb({"worker": "w", "abandon_after": 30.0})
    readers.commands()
    list(readers.received([[[b"headrace:stream:c", [[b"1-0", [b"type", b"start", b"data", data]]]]]]))
    assert [key for key in asked(readers) if "listener" in key][:1] == ["headrace:listener:c"]
    assert "headrace:listener:a" not in asked(readers)
