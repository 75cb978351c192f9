"""A subscriber's position in a stream, with a scripted server in place of Redis."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest

from headrace_broker.errors import InvalidRequestError, ResultTimeoutError, StreamExpiredError
from headrace_broker.events import EndEvent, StreamEvent, pack
from headrace_broker.streams import StreamWrite, end_data
from headrace_broker.subscriber import Readers, read_stream

Entry = tuple[bytes, dict[bytes, bytes]]


def chunk(attempt: int, offset: int) -> Entry:
    data = StreamWrite.chunk("r", attempt, offset, index=0, token_ids=[offset], text="t").data
    return f"{attempt}-{offset}".encode(), {b"type": b"chunk", b"data": data}


def end(attempt: int, offset: int) -> Entry:
    return f"{attempt}-{offset}".encode(), {b"type": b"end", b"data": pack(end_data("stop", None, None))}


def as_sent(entry: Entry) -> list[Any]:
    entry_id, fields = entry
    return [entry_id, [part for pair in fields.items() for part in pair]]


class ScriptedServer:
    """Answers each XREAD with the next batch; remembers what it was asked."""

    def __init__(self, batches: list[list[Entry]], newest: list[Entry], *, ended: bool = False) -> None:
        self.ended = ended
        self.listener: bytes | None = None
        self.touches = 0
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
        self.touches += 1
        self.replies.append(1)

    def execute(self) -> list[Any]:
        return self.replies


def read(server: ScriptedServer, **options: Any) -> list[StreamEvent]:
    return list(read_stream(server, "r", **options))  # type: ignore[arg-type]


def test_each_read_goes_on_where_the_last_one_ended() -> None:
    server = ScriptedServer([[chunk(1, 1), chunk(1, 2)], [], [chunk(2, 3)], [end(2, 4)]], [chunk(1, 2)])
    events = read(server)
    assert [event.entry_id for event in events] == ["1-1", "1-2", "2-3", "2-4"]
    assert [asked for asked, _ in server.asked] == ["0-0", "1-2", "1-2", "2-3"]


def test_nothing_is_read_after_the_end() -> None:
    server = ScriptedServer([[chunk(1, 1), end(1, 2)]], [])
    assert isinstance(read(server)[-1], EndEvent)
    assert server.batches == []


@pytest.mark.parametrize("last_id", ["0-0", "1-1"])
def test_whoever_comes_looks_before_waiting(last_id: str) -> None:
    server = ScriptedServer([[], [end(1, 2)]], [chunk(1, 1)])
    read(server, last_id=last_id)
    assert [block is None for _, block in server.asked] == [True, False]


def test_resuming_after_the_end_yields_nothing_more() -> None:
    assert read(ScriptedServer([[]], [end(1, 2)]), last_id="1-2") == []


def test_an_end_that_arrives_just_after_an_empty_read_is_not_swallowed() -> None:
    server = ScriptedServer([[], [end(1, 2)]], [end(1, 2)])
    assert [event.entry_id for event in read(server, last_id="1-1")] == ["1-2"]


def test_a_stream_that_vanished_is_not_waited_for() -> None:
    with pytest.raises(StreamExpiredError, match="the last entry read was 1-1"):
        read(ScriptedServer([[chunk(1, 1)], []], []))
    with pytest.raises(StreamExpiredError):
        read(ScriptedServer([[]], []), last_id="1-1")


def test_a_stream_that_has_expired_is_not_waited_for() -> None:
    with pytest.raises(StreamExpiredError, match="the last entry read was 0-0"):
        read(ScriptedServer([[]], [], ended=True))


def test_a_stream_that_nobody_began_is_waited_for() -> None:
    assert len(read(ScriptedServer([[], [], [end(1, 1)]], []))) == 1


def test_silence_ends_after_the_timeout() -> None:
    with pytest.raises(ResultTimeoutError, match="no stream entry within 0 s"):
        read(ScriptedServer([[], []], []), timeout=0)


def test_a_single_wait_is_never_longer_than_what_is_left() -> None:
    server = ScriptedServer([[], [end(1, 1)]], [])
    read(server, timeout=4.5)  # a little less than a wait is without it
    _, wait = (block for _, block in server.asked)
    assert wait is not None
    assert 0 < wait <= 4500


@pytest.mark.parametrize("last_id", ["", "1", "1-", "$", "1-1-1", "-1-0"])
def test_a_position_that_is_no_entry_id_is_refused(last_id: str) -> None:
    with pytest.raises(InvalidRequestError, match="last_id"):
        read(ScriptedServer([], []), last_id=last_id)


def start(abandon_after: float | None) -> Entry:
    data = {"worker": "w"} | ({} if abandon_after is None else {"abandon_after": abandon_after})
    return b"1-0", {b"type": b"start", b"data": pack(data)}


def test_a_request_that_wants_listeners_is_touched_and_no_wait_is_longer_than_a_third_of_its_patience() -> None:
    server = ScriptedServer([[start(6)], [chunk(1, 1)], [end(1, 2)]], [])
    read(server)
    assert server.touches == 1  # no third has passed since
    *_, wait = (block for _, block in server.asked)
    assert wait is not None
    assert wait <= 2000


def test_one_that_comes_before_the_worker_or_resumes_learns_of_it_from_the_key() -> None:
    for last_id in ("0-0", "1-1"):
        server = ScriptedServer([[], [chunk(1, 2)], [end(1, 3)]], [chunk(1, 1)])
        server.listener = b"30"
        read(server, last_id=last_id)
        assert server.touches == 1
    busy = ScriptedServer([[chunk(1, 2)], [chunk(1, 3)], [end(1, 4)]], [chunk(1, 2)])
    busy.listener = b"30.0"
    read(busy, last_id="1-1")
    assert busy.touches == 1


def test_a_request_that_wants_no_listeners_is_never_touched() -> None:
    server = ScriptedServer([[], [start(None)], [chunk(1, 1)], [end(1, 2)]], [])
    read(server)
    assert server.touches == 0


class ManyStreams:
    """The readers of streams a, b and c, and a server's replies to what they ask."""

    def __init__(self) -> None:
        self.readers = Readers(dict.fromkeys("abc", "0-0"), None)
        self.receive({name: [start(None)] for name in "abc"})

    def receive(self, *replies: dict[str, list[Entry]]) -> list[tuple[str, str]]:
        flat = [
            [[f"headrace:stream:{name}".encode(), list(map(as_sent, entries))] for name, entries in reply.items()]
            for reply in replies
        ]
        self.readers.commands()  # what comes is the answer to it
        return [(request_id, event.entry_id) for request_id, event in self.readers.received(flat)]

    def asks(self) -> list[bool]:
        """Of each command that is sent together with the others, whether it waits."""
        return [b"BLOCK" in command for command in self.readers.commands()]


def test_where_a_server_wakes_for_one_stream_of_many_the_others_are_read_at_once() -> None:
    streams = ManyStreams()
    assert streams.asks() == [True]
    streams.receive({"b": [chunk(1, 1)]})
    assert streams.asks() == [True]  # perhaps b alone had something
    streams.receive({"a": [chunk(1, 1)], "c": [chunk(1, 1)]})
    assert streams.asks() == [True, False]
    step = {"a": [chunk(1, 2)], "b": [chunk(1, 2)], "c": [chunk(1, 2), end(1, 3)]}
    assert streams.receive({"c": step["c"][:1]}, step) == [("c", "1-2"), ("a", "1-2"), ("b", "1-2"), ("c", "1-3")]
    assert streams.asks() == [True, False]
    assert streams.receive({"a": [end(1, 3)]}, {"a": [end(1, 3)], "b": [chunk(1, 3)]}) == [("a", "1-3"), ("b", "1-3")]
    assert streams.asks() == [True]  # one is left


@pytest.mark.parametrize("first", ["alone", "with others", "nothing"])
def test_it_is_read_once_again_as_soon_as_the_second_read_brings_nothing_more(first: str) -> None:
    streams = ManyStreams()
    streams.receive({"b": [chunk(1, 1)]})
    streams.receive({"a": [chunk(1, 1)], "c": [chunk(1, 1)]})
    assert streams.asks() == [True, False]
    names = {"alone": "a", "with others": "ab", "nothing": ""}[first]
    reply = {name: [chunk(1, 2)] for name in names}
    assert streams.receive(reply, reply) == [(name, "1-2") for name in names]
    assert streams.asks() == [True]
