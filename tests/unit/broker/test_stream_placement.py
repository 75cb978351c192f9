"""The home of a request and the table of the stream servers."""

from collections import Counter

import msgpack
import pytest

from headrace_broker.errors import SettingsError
from headrace_broker.server.stream_table import StreamServerRow, StreamTable, home_of
from headrace_broker.settings import BrokerSettings

FOUR = ("s1", "s2", "s3", "s4")


@pytest.mark.parametrize(
    ("request_id", "of_two", "of_four", "of_five"),
    [
        ("a", "s2", "s2", "s2"),
        ("00000000-0000-4000-8000-000000000000", "s2", "s4", "s4"),
        ("resp_0123456789abcdef0123456789abcdef", "s2", "s2", "s2"),
        ("größe", "s1", "s1", "s1"),
    ],
)
def test_the_homes_of_docs_wire(request_id: str, of_two: str, of_four: str, of_five: str) -> None:
    found = home_of(FOUR[:2], request_id), home_of(FOUR, request_id), home_of((*FOUR, "s5"), request_id)
    assert found == (of_two, of_four, of_five)


def test_a_new_server_takes_its_share_from_all_others_and_moves_nothing_else() -> None:
    ids = [f"r{number}" for number in range(4000)]
    before, after = ([home_of(names, each) for each in ids] for names in (FOUR, (*FOUR, "s5")))
    assert all(900 < count < 1100 for count in Counter(before).values())
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert {*moved} == {"s5"}
    assert 700 < len(moved) < 900


def test_homes_are_those_of_every_table_since_a_time_the_newest_first() -> None:
    rows = {"s1": StreamServerRow(100, None, "x"), "s2": StreamServerRow(200, 300, "y")}
    table = StreamTable(rows)
    of_s2 = next(name for name in map(str, range(99)) if home_of(("s1", "s2"), name) == "s2")
    of_s1 = next(name for name in map(str, range(99)) if home_of(("s1", "s2"), name) == "s1")
    assert table.homes(of_s2, 0) == ["s1", "s2", ""]
    assert table.homes(of_s2, 150) == ["s1", "s2"]
    assert table.homes(of_s2, 250) == ["s1", "s2"]
    assert table.homes(of_s2, 350) == ["s1"]
    assert table.homes(of_s1, 150) == ["s1"]
    assert StreamTable({}).homes("r", 0) == [""]


def test_fields_that_cannot_be_read_are_ignored_and_named() -> None:
    row = StreamServerRow(1, None, "x")
    fields = {
        b"s1": row.pack(),
        b"Upper": row.pack(),
        b"s2": b"\xc1",
        b"s3": msgpack.packb({"since": "now", "id": "x"}),
        b"s4": msgpack.packb([1]),
    }
    table = StreamTable.read(fields)
    assert table.rows == {"s1": row}
    assert table.unreadable == ("Upper", "s2", "s3", "s4")


def test_stream_urls_name_the_servers() -> None:
    text = "s1=redis://a,s2=sentinel://h:1,i:2/0?master=m,c1=redis+cluster://h:1,i:2,s3=redis://b"
    assert BrokerSettings(stream_urls=text).stream_url_by_name == {
        "s1": "redis://a/0",
        "s2": "sentinel://h:1,i:2/0?master=m",
        "c1": "redis+cluster://h:1,i:2/0",
        "s3": "redis://b/0",
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (",", "stream_urls must be name=url pairs separated by commas, got ','"),
        ("s1=redis+cluster://h/1", "the URL of 's1' in stream_urls names the database 1, and a Redis Cluster has only"),
        ("s1=rediscluster://h", r"must name nodes of its Redis Cluster as redis\+cluster://host:port,host:port, not"),
        ("s1=redis+cluster://u:secret@h,", r"must list nodes of the Cluster as host:port,host:port, not ''"),
        ("s1=redis+cluster://h?ssl_ca_certs=/x", r"need TLS: .*rediss\+cluster://"),
        ("s1=redis+cluster://h?socket_timeout=1", "unknown options: socket_timeout"),
        ("redis://u:secret@h/0", r"stream_urls must be name=url pairs separated by commas, got 'redis://\.\.\.'"),
        ("S1=redis://h", "a name of stream_urls must be 1 to 32 of the characters a-z 0-9 -, got 'S1'"),
        (f"{'a' * 33}=redis://h", "must be 1 to 32 of the characters"),
        ("=redis://h", "must be 1 to 32 of the characters"),
        ("a=redis://h,a=redis://i", "stream_urls must name each server once, got 'a' twice"),
        ("a=amqp://u:secret@h", r"the URL of 'a' in stream_urls must look like .*, not amqp://\.\.\."),
        (",".join(f"s{number}=redis://h" for number in range(17)), "stream_urls must name at most 16 servers, got 17"),
    ],
)
def test_stream_urls_that_cannot_be_used_are_refused_with_the_value_and_the_rule(text: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem) as caught:
        BrokerSettings(stream_urls=text)
    assert "secret" not in str(caught.value)
