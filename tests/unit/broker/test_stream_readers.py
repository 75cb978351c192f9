"""Streams that are joined and left while a read of others is on its way."""

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
