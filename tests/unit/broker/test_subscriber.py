"""A subscriber's position in a stream, with a scripted server in place of Redis."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest

from headrace_broker.errors import InvalidRequestError, ResultTimeoutError, StreamExpiredError
from headrace_broker.packing import pack, pack_rows
from headrace_broker.streams.events import EndEvent, StreamEvent
from headrace_broker.streams.subscriber import Readers, read_stream
from headrace_broker.streams.writer import StreamWrite, end_data

Entry = tuple[bytes, dict[bytes, bytes]]


def chunk(attempt: int, offset: int) -> Entry:
    data = StreamWrite.chunk("r", attempt, offset, index=0, token_ids=[offset], text="t").data
    return f"{attempt}-{offset}".encode(), {b"type": b"chunk", b"data": data}


def started(attempt: int) -> Entry:
    return f"{attempt}-0".encode(), {b"type": b"start", b"data": pack({"worker": "w"})}


def rows_of(attempt: int, first: int, count: int) -> Entry:
    data = pack_rows({"first": first, "count": count, "bytes": bytes(4 * count)})
    return f"{attempt}-{first + count}".encode(), {b"type": b"chunk", b"data": data}


def end(attempt: int, offset: int) -> Entry:
    return f"{attempt}-{offset}".encode(), {b"type": b"end", b"data": pack(end_data("stop", None, None))}


def as_sent(entry: Entry) -> list[Any]:
    entry_id, fields = entry
    return [entry_id, [part for pair in fields.items() for part in pair]]


class ScriptedServer:
    """Answers each XREAD with the next batch and records the command."""

    def __init__(self, batches: list[list[Entry]], newest: list[Entry], *, ended: bool = False) -> None:
        self.ended = ended
        self.listener: bytes | None = None
        self.heartbeats = 0
        self.batches = batches
        self.newest = newest
        self.asked: list[tuple[str, int | None]] = []

    def execute_command(self, *command: Any) -> list[Any] | None:
        *options, word, key, last_id = command
        assert (options[:3], word, key) == ([b"XREAD", b"COUNT", 1000], b"STREAMS", b"headrace:stream:r")
        self.asked.append((last_id, options[4] if options[3:] else None))
        batch = self.batches.pop(0)
        return [[key, list(map(as_sent, batch))]] if batch else None

    @contextmanager
    def pipeline(self, transaction: bool) -> Iterator[Self]:
        assert not transaction
        self.replies: list[Any] = []
        yield self

    def exists(self, key: str) -> None:
        self.replies.append(int(self.ended))

    def xrevrange(self, key: str, count: int) -> None:
        self.replies.append(self.newest)

    def get(self, key: str) -> None:
        self.replies.append(self.listener)

    def expire(self, key: str, seconds: int) -> None:
        assert key == "headrace:listener:r"
        self.heartbeats += 1
        self.replies.append(1)

    def execute(self) -> list[Any]:
        return self.replies


def read(server: ScriptedServer, **options: Any) -> list[StreamEvent]:
    return list(read_stream(server, "r", **options))  # type: ignore[arg-type]


def test_each_read_continues_where_the_last_one_ended() -> None:
    server = ScriptedServer([[chunk(1, 1), chunk(1, 2)], [], [chunk(2, 3)], [end(2, 4)]], [chunk(1, 2)])
    events = read(server)
    assert [event.entry_id for event in events] == ["1-1", "1-2", "2-3", "2-4"]
    assert [asked for asked, _ in server.asked] == ["0-0", "1-2", "1-2", "2-3"]


def test_nothing_is_read_after_the_end() -> None:
    server = ScriptedServer([[chunk(1, 1), end(1, 2)]], [])
    assert isinstance(read(server)[-1], EndEvent)
    assert server.batches == []


@pytest.mark.parametrize("last_id", ["0-0", "1-1"])
def test_a_subscriber_checks_the_stream_before_it_waits(last_id: str) -> None:
    server = ScriptedServer([[], [end(1, 2)]], [chunk(1, 1)])
    read(server, last_id=last_id)
    assert [block is None for _, block in server.asked] == [True, False]


def test_resuming_after_the_end_yields_nothing_more() -> None:
    assert read(ScriptedServer([[]], [end(1, 2)]), last_id="1-2") == []


def test_an_end_that_arrives_just_after_an_empty_read_is_not_lost() -> None:
    server = ScriptedServer([[], [end(1, 2)]], [end(1, 2)])
    assert [event.entry_id for event in read(server, last_id="1-1")] == ["1-2"]


def test_a_deleted_stream_raises() -> None:
    with pytest.raises(StreamExpiredError, match="the last entry read was 1-1"):
        read(ScriptedServer([[chunk(1, 1)], []], []))
    with pytest.raises(StreamExpiredError):
        read(ScriptedServer([[]], []), last_id="1-1")


def test_an_expired_stream_raises() -> None:
    with pytest.raises(StreamExpiredError, match="the last entry read was 0-0"):
        read(ScriptedServer([[]], [], ended=True))


def test_a_subscriber_waits_for_a_stream_that_has_not_begun() -> None:
    assert len(read(ScriptedServer([[], [], [end(1, 1)]], []))) == 1


def test_a_silent_stream_times_out() -> None:
    with pytest.raises(ResultTimeoutError, match="no stream entry within 0 s"):
        read(ScriptedServer([[], []], []), timeout=0)


def test_a_single_wait_is_never_longer_than_the_time_left() -> None:
    server = ScriptedServer([[], [end(1, 1)]], [])
    read(server, timeout=4.5)  # a little less than a wait is without it
    _, wait = (block for _, block in server.asked)
    assert wait is not None
    assert 0 < wait <= 4500


@pytest.mark.parametrize("last_id", ["", "1", "1-", "$", "1-1-1", "-1-0"])
def test_a_last_id_that_is_not_an_entry_id_is_refused(last_id: str) -> None:
    with pytest.raises(InvalidRequestError, match="last_id"):
        read(ScriptedServer([], []), last_id=last_id)


def start(abandon_after: float | None) -> Entry:
    data = {"worker": "w"} | ({} if abandon_after is None else {"abandon_after": abandon_after})
    return b"1-0", {b"type": b"start", b"data": pack(data)}


def test_heartbeats_are_sent_and_no_wait_exceeds_a_third_of_abandon_after() -> None:
    server = ScriptedServer([[start(6)], [chunk(1, 1)], [end(1, 2)]], [])
    read(server)
    assert server.heartbeats == 1  # a third of abandon_after has not passed since
    *_, wait = (block for _, block in server.asked)
    assert wait is not None
    assert wait <= 2000


def test_abandon_after_is_read_from_the_key_before_a_start_and_on_resuming() -> None:
    for last_id in ("0-0", "1-1"):
        server = ScriptedServer([[], [chunk(1, 2)], [end(1, 3)]], [chunk(1, 1)])
        server.listener = b"30"
        read(server, last_id=last_id)
        assert server.heartbeats == 1
    busy = ScriptedServer([[chunk(1, 2)], [chunk(1, 3)], [end(1, 4)]], [chunk(1, 2)])
    busy.listener = b"30.0"
    read(busy, last_id="1-1")
    assert busy.heartbeats == 1


def test_a_request_without_abandon_after_gets_no_heartbeats() -> None:
    server = ScriptedServer([[], [start(None)], [chunk(1, 1)], [end(1, 2)]], [])
    read(server)
    assert server.heartbeats == 0


class ManyStreams:
    """The readers of streams a, b and c, and a server's replies to their commands."""

    def __init__(self) -> None:
        self.readers = Readers(dict.fromkeys("abc", "0-0"), None)
        self.receive({name: [start(None)] for name in "abc"})

    def receive(self, *replies: dict[str, list[Entry]]) -> list[tuple[str, str]]:
        flat = [
            [[f"headrace:stream:{name}".encode(), list(map(as_sent, entries))] for name, entries in reply.items()]
            for reply in replies
        ]
        self.readers.commands()  # the replies answer these commands
        return [(request_id, event.entry_id) for request_id, event in self.readers.received(flat)]

    def asks(self) -> list[bool]:
        """Return for each command that is sent together whether it blocks."""
        return [b"BLOCK" in command for command in self.readers.commands()]


def test_if_the_server_wakes_for_one_stream_the_others_are_read_at_once() -> None:
    streams = ManyStreams()
    assert streams.asks() == [True]
    streams.receive({"b": [chunk(1, 1)]})
    assert streams.asks() == [True]  # perhaps only b had entries
    streams.receive({"a": [chunk(1, 1)], "c": [chunk(1, 1)]})
    assert streams.asks() == [True, False]
    step = {"a": [chunk(1, 2)], "b": [chunk(1, 2)], "c": [chunk(1, 2), end(1, 3)]}
    assert streams.receive({"c": step["c"][:1]}, step) == [("c", "1-2"), ("a", "1-2"), ("b", "1-2"), ("c", "1-3")]
    assert streams.asks() == [True, False]
    assert streams.receive({"a": [end(1, 3)]}, {"a": [end(1, 3)], "b": [chunk(1, 3)]}) == [("a", "1-3"), ("b", "1-3")]
    assert streams.asks() == [True]  # one stream is left


@pytest.mark.parametrize("first", ["alone", "with others", "nothing"])
def test_one_command_is_enough_when_the_second_read_returns_nothing_more(first: str) -> None:
    streams = ManyStreams()
    streams.receive({"b": [chunk(1, 1)]})
    streams.receive({"a": [chunk(1, 1)], "c": [chunk(1, 1)]})
    assert streams.asks() == [True, False]
    names = {"alone": "a", "with others": "ab", "nothing": ""}[first]
    reply = {name: [chunk(1, 2)] for name in names}
    assert streams.receive(reply, reply) == [(name, "1-2") for name in names]
    assert streams.asks() == [True]


def test_chunks_that_the_reader_has_already_are_left_out_after_the_server_has_lost_entries() -> None:
    again = [started(2), chunk(2, 2), chunk(2, 3), chunk(2, 4), end(2, 5)]
    server = ScriptedServer([[chunk(1, 1), chunk(1, 2), chunk(1, 3)], again], [chunk(1, 3)])
    assert [event.entry_id for event in read(server)] == ["1-1", "1-2", "1-3", "2-0", "2-4", "2-5"]


def test_a_chunk_without_tokens_and_rows_in_order_are_never_left_out() -> None:
    last = (b"2-2", {b"type": b"chunk", b"data": StreamWrite.chunk("r", 2, 2, index=0, token_ids=[], text="").data})
    server = ScriptedServer([[chunk(1, 1), chunk(1, 2), started(2), last, end(2, 3)]], [])
    assert [event.entry_id for event in read(server)] == ["1-1", "1-2", "2-0", "2-2", "2-3"]
    rows = ScriptedServer([[rows_of(1, 0, 2), rows_of(1, 2, 1), started(2), rows_of(2, 1, 2), rows_of(2, 3, 1)]], [])
    rows.batches[0].append(end(2, 5))
    assert [event.entry_id for event in read(rows)] == ["1-2", "1-3", "2-0", "2-4", "2-5"]
