"""The script that sorts a message records the stream server of its request."""

import json
import random
from typing import Any

import msgpack
import pytest
import redis

from headrace_broker.keys import STREAM_SERVERS_KEY, lease_records_key
from headrace_broker.queue.leases import SCRIPTS, Leases
from headrace_broker.server.stream_table import StreamServerRow, StreamTable, home_of
from service.broker.tenant_messages import LISTS, QUEUE, envelope

NAMES = ("s1", "s2", "s3", "s4")


def open_servers(client: "redis.Redis", *names: str, until: int | None = None) -> None:
    for name in names:
        client.hset(STREAM_SERVERS_KEY, name, StreamServerRow(1, until, "x").pack())


@pytest.fixture
def leases(redis_client: "redis.Redis") -> Leases:
    return Leases(redis_client, lease_seconds=30, delivery_limit=5)


def records(client: "redis.Redis") -> dict[str, dict[str, Any]]:
    found: Any = client.hgetall(lease_records_key(QUEUE))
    unpacked = [msgpack.unpackb(packed) for packed in found.values()]
    return {record["request"]: record for record in unpacked}


def push(client: "redis.Redis", *request_ids: str) -> None:
    for request_id in request_ids:
        client.lpush(LISTS[0], envelope(request_id, "t", id=request_id))


def test_lua_and_python_choose_the_same_home(redis_client: "redis.Redis") -> None:
    open_servers(redis_client, *NAMES)
    text = SCRIPTS["bind"].text
    call = text[: text.index("if not owned_list(id, owner)")].replace("-- RIGHTS: LEASES", "")
    ids = ["a", "größe", "x" * 2000, *(f"r{random.getrandbits(64)}" for _ in range(300))]  # any ids
    for request_id in ids:
        found = redis_client.eval(f"{call}\nreturn home_of(request)", 1, QUEUE, "", "", request_id)
        assert found == home_of(NAMES, request_id).encode()


def test_a_message_carries_its_home_to_its_worker_and_keeps_it_when_the_table_changes(
    redis_client: "redis.Redis", leases: Leases
) -> None:
    open_servers(redis_client, "s1", "s2")
    push(redis_client, "a", "größe")
    messages = leases.fetch(LISTS, 2)
    homes = {message.bound_id: message.home for message in messages}
    assert homes == {"a": "s2", "größe": "s1"}
    assert {name: record["at"] for name, record in records(redis_client).items()} == homes
    for message in messages:
        leases.requeue(message.lease_id)
    open_servers(redis_client, "s1", "s2", until=2)
    open_servers(redis_client, "s3")
    assert {message.bound_id: message.home for message in leases.fetch(LISTS, 2)} == homes
    push(redis_client, "b")
    assert [message.home for message in leases.fetch(LISTS, 2)] == ["s3"]


def test_without_a_table_a_record_is_as_before(redis_client: "redis.Redis", leases: Leases) -> None:
    push(redis_client, "a")
    assert [message.home for message in leases.fetch(LISTS, 1)] == [""]
    assert "at" not in records(redis_client)["a"]


def test_rows_that_cannot_be_read_or_are_not_open_get_no_streams(redis_client: "redis.Redis", leases: Leases) -> None:
    open_servers(redis_client, "s1")
    open_servers(redis_client, "s2", until=5)
    far = StreamServerRow(10**14, None, "x").pack()
    redis_client.hset(STREAM_SERVERS_KEY, mapping={"s3": b"\xc1", "s4": far, "s5": msgpack.packb({"since": 1})})
    push(redis_client, *(f"r{number}" for number in range(20)))
    assert {message.home for message in leases.fetch(LISTS, 20)} == {"s1"}


def test_a_table_of_the_wrong_type_blocks_sorting_and_is_named(redis_client: "redis.Redis", leases: Leases) -> None:
    redis_client.set(STREAM_SERVERS_KEY, "x")
    push(redis_client, "a")
    with pytest.raises(redis.ResponseError, match="headrace:stream-servers holds a string"):
        leases.fetch(LISTS, 1)
    assert redis_client.llen(LISTS[0]) == 1


def test_a_dead_letter_names_the_home_of_its_stream(redis_client: "redis.Redis") -> None:
    open_servers(redis_client, "s1", "s2")
    leases = Leases(redis_client, lease_seconds=30, delivery_limit=1)
    letters: list[Any] = []
    leases.on_dead_letter = letters.append
    push(redis_client, "a")
    [message] = leases.fetch(LISTS, 1)
    leases.requeue(message.lease_id, is_counted=True)
    assert leases.fetch(LISTS, 1) == []
    assert [(letter.answered_id, letter.home) for letter in letters] == [("a", "s2")]


def test_a_request_id_that_only_the_worker_can_read_gets_its_home_when_it_is_bound(
    redis_client: "redis.Redis", leases: Leases
) -> None:
    open_servers(redis_client, "s1", "s2")
    message = json.loads(envelope("a", "t", id="größe"))
    headers = message.pop("headers")
    long = {"headers": headers, **message, "body": "x" * 300_000}
    redis_client.lpush(LISTS[0], json.dumps(long))
    [found] = leases.fetch(LISTS, 1)
    assert (found.bound_id, found.home) == (None, "")
    assert leases.bind(found, "größe") == "s1"
    leases.requeue(found.lease_id)
    assert [(each.bound_id, each.home) for each in leases.fetch(LISTS, 1)] == [("größe", "s1")]


@pytest.mark.parametrize("taken_from", [None, len(LISTS)])
def test_a_fetch_passes_over_the_messages_of_servers_that_are_away(
    redis_client: "redis.Redis", leases: Leases, taken_from: int | None
) -> None:
    open_servers(redis_client, "s1", "s2")
    ids = [f"r{number}" for number in range(20)]
    push(redis_client, *ids)
    leases.away_homes = lambda: ["s1"]
    taken = [message.bound_id for message in leases.fetch(LISTS, 20, taken_from=taken_from)]
    assert sorted(filter(None, taken)) == sorted(each for each in ids if home_of(("s1", "s2"), each) == "s2")
    assert leases.fetch(LISTS, 20, taken_from=taken_from) == []
    leases.away_homes = tuple
    assert len(taken) + len(leases.fetch(LISTS, 20)) == 20


def test_a_fetch_looks_at_a_bounded_number_of_messages_of_servers_that_are_away(
    redis_client: "redis.Redis", leases: Leases
) -> None:
    open_servers(redis_client, "s1")
    push(redis_client, *(f"r{number}" for number in range(1000)))
    leases.away_homes = lambda: ["s1"]
    leases.sort(LISTS)
    while redis_client.llen(LISTS[0]):
        leases.sort(LISTS)
    before = redis_client.info("commandstats")["cmdstat_hget"]["calls"]
    assert leases.fetch(LISTS, 20) == []
    assert redis_client.info("commandstats")["cmdstat_hget"]["calls"] - before < 100


def test_the_table_in_redis_is_the_one_that_readers_use(redis_client: "redis.Redis") -> None:
    open_servers(redis_client, "s1", "s2")
    fields: Any = redis_client.hgetall(STREAM_SERVERS_KEY)
    assert StreamTable.read(fields).open_servers(5) == ["s1", "s2"]
