"""Streams that are added and removed while a read of other streams is in progress."""

from unittest.mock import Mock

import msgpack

from headrace_broker.streams.subscriber import Readers


def entry(offset: int) -> list[object]:
    data = msgpack.packb({"index": 0, "token_ids": [offset], "text": "x", "logprobs": None})
    return [f"1-{offset}".encode(), [b"type", b"chunk", b"data", data]]


def reply(*offsets: int) -> list[object]:
    return [[[b"headrace:stream:a", [entry(offset) for offset in offsets]]]]


def test_a_reply_for_a_removed_reader_is_not_given_to_its_replacement() -> None:
    readers = Readers({"a": "1-50"}, None)
    readers.commands()
    readers.remove("a")
    readers.add("a", "0-0")
    assert list(readers.received(reply(51, 52))) == []
    assert b"0-0" in [part if isinstance(part, bytes) else str(part).encode() for part in readers.commands()[0]]
    assert [event.entry_id for _, event in readers.received(reply(1, 2))] == ["1-1", "1-2"]


def test_a_stream_removed_during_a_read_yields_no_events() -> None:
    readers = Readers({"a": "0-0", "b": "0-0"}, None)
    readers.commands()
    readers.remove("a")
    assert list(readers.received(reply(1))) == []
    assert readers


def begin(readers: Readers, request_id: str, abandon_after: float | None) -> None:
    """Give the reader a start entry, and note its heartbeats and checks as sent."""
    data = msgpack.packb({"worker": "w", "abandon_after": abandon_after})
    readers.commands()
    list(
        readers.received([[[f"headrace:stream:{request_id}".encode(), [[b"1-0", [b"type", b"start", b"data", data]]]]]])
    )
    checked_keys(readers)


def checked_keys(readers: Readers) -> list[str]:
    """Return the keys of the heartbeats and the checks."""
    pipe = Mock()
    if readers.needs_checks():
        readers.add_checks(pipe)
    return [call.args[0] for call in pipe.method_calls]


def test_adding_a_stream_checks_no_other_silent_stream() -> None:
    readers = Readers({"a": "0-0", "b": "0-0"}, None)
    begin(readers, "a", None)
    begin(readers, "b", None)
    readers.add("c", "0-0")
    readers.commands()
    assert list(readers.received([None])) == []
    assert checked_keys(readers) == ["headrace:ended:c", "headrace:stream:c", "headrace:listener:c"]
    readers.commands()
    assert list(readers.received([None])) == []
    assert {key.rpartition(":")[2] for key in checked_keys(readers)} == {"a", "b", "c"}, (
        "all were silent for a whole wait"
    )


def test_a_start_entry_sends_a_heartbeat_for_its_own_stream_only() -> None:
    readers = Readers({"a": "0-0", "b": "0-0"}, None)
    begin(readers, "a", 30.0)
    readers.add("c", "0-0")
    data = msgpack.packb({"worker": "w", "abandon_after": 30.0})
    readers.commands()
    list(readers.received([[[b"headrace:stream:c", [[b"1-0", [b"type", b"start", b"data", data]]]]]]))
    assert [key for key in checked_keys(readers) if "listener" in key][:1] == ["headrace:listener:c"]
    assert "headrace:listener:a" not in checked_keys(readers)
