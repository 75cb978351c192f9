"""Wrong values in the queue's keys: no message is lost, and all are served once the key is repaired."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import msgpack
import pytest
import redis
from kombu import Connection

from headrace_broker.app import LEASE_TRANSPORT
from headrace_broker.keys import (
    dead_letters_key,
    deadlines_key,
    lease_bodies_key,
    lease_deliveries_key,
    lease_meta_key,
    lease_records_key,
    lease_requests_key,
    leases_key,
    queue_lists,
    sorted_ids_key,
    tenant_deadlines_key,
    tenant_ids_key,
    waiting_key,
)
from headrace_broker.queue.dead_letters import dead_letters, purge, requeue
from headrace_broker.queue.fair_share import ARRIVAL, DEADLINE, FairShare
from headrace_broker.queue.leases import Leases
from headrace_broker.queue.levels import QueueLevelReader
from headrace_broker.queue.worker_leases import WorkerLeases
from headrace_broker.server.connections import connect
from headrace_wire.codes import DeadLetterReason
from service.broker.tenant_messages import LISTS, QUEUE, envelope, names
from service.servers import make_server

DUE: Final = 1.0
"""Expiry of a lease that ended long ago, in unix seconds."""
PUT: Final[dict[str, Callable[["redis.Redis", str], object]]] = {
    "string": lambda client, key: client.set(key, "x"),
    "list": lambda client, key: client.rpush(key, "x"),
    "hash": lambda client, key: client.hset(key, "x", "y"),
    "set": lambda client, key: client.sadd(key, "x"),
    "zset": lambda client, key: client.zadd(key, {"x": 1}),
    "stream": lambda client, key: client.xadd(key, {"x": "y"}),
}


@pytest.fixture(scope="module")
def client() -> Iterator["redis.Redis"]:
    with make_server() as server, connect(server.url) as client:
        yield client


def url_of(client: "redis.Redis") -> str:
    options = client.connection_pool.connection_kwargs
    return f"redis://{options['host']}:{options['port']}/0"


def make_leases(client: "redis.Redis", order: str = ARRIVAL) -> Leases:
    return Leases(client, lease_seconds=60, delivery_limit=100, fair_share=FairShare(order=order))


class Scene:
    """A queue of two tenants with messages in every phase, and two workers that hold some of them."""

    def __init__(self, client: "redis.Redis") -> None:
        client.flushall()
        self.client = client
        self.holder = make_leases(client)
        self.other = make_leases(client, DEADLINE)
        self.acked: set[bytes] = set()
        self._number = 0
        self.messages: set[bytes] = set()
        for step in (0, 1):  # the first fetch takes these
            self._push(step, "a", "b")
        self.held = [
            message for message in self.holder.fetch(LISTS, 4) if not self.holder.hold(message.lease_id, message)
        ]
        for step in (0, 1):
            self._push(step, "a", "b")
        postponed = self.other.fetch(LISTS, 2)
        for message, seconds in zip(postponed, (3000, 0), strict=True):
            self.other.postpone(message.lease_id, seconds)
        (dead,) = self.other.fetch(LISTS, 1)
        self.other.dead_letter(dead.lease_id, DeadLetterReason.REJECTED)
        for step in (0, 1, 3):
            self._push(step, "a", "b")
        self.other.fetch(LISTS, 0)
        self._push(0, "a", "b")

    def _push(self, step: int, *tenants: str) -> None:
        for tenant in tenants:
            self._number += 1
            deadline = {"expires": f"{2100 - self._number}-01-01T00:00:00Z"} if self._number % 5 else {}
            body = envelope(f"message-{self._number}", tenant, id=f"request-{self._number}", **deadline)
            self.messages.add(body.encode())
            self.client.lpush(LISTS[step], body)

    def operate(self) -> None:
        """Do everything that workers and operators do, except purging, whose errors the caller has to see."""
        first, second, third, _ = self.held
        self._acknowledge(first)
        self.holder.requeue(second.lease_id)
        self.holder.postpone(third.lease_id, 0)
        self.holder.tick()
        for attempt in (
            lambda: self.other.sort(LISTS),
            self.other.reap,
            lambda: self._take(2),
            lambda: requeue(self.client, dead_letters(self.client, QUEUE)),
            lambda: QueueLevelReader(self.client).read([QUEUE]),
            lambda: self._take(100),
        ):
            with suppress(redis.ResponseError):
                attempt()
        self.holder.tick()

    def _acknowledge(self, message: Any) -> None:
        self.acked.add(message.body)
        self.holder.ack(message.lease_id)

    def _take(self, count: int) -> None:
        for number, message in enumerate(self.other.fetch(LISTS, count)):
            if number % 3 == 0:
                self.other.requeue(message.lease_id)
            elif number % 3 == 1:
                self.other.dead_letter(message.lease_id, DeadLetterReason.UNDELIVERABLE, "Error")

    def drain(self) -> set[bytes]:
        """Let all leases expire, requeue the dead letters, and return all messages that workers get."""
        got: set[bytes] = set()
        for _ in range(6):
            self.holder.tick()
            self.other.tick()
            requeue(self.client, dead_letters(self.client, QUEUE))
            for key in self.client.keys("headrace:lease:*"):
                for lease_id in self.client.zrange(key, 0, -1) if self.client.type(key) == b"zset" else ():
                    self.client.zadd(key, {lease_id: DUE})
            worker = make_leases(self.client)
            worker.reap(QUEUE)
            for message in worker.fetch(LISTS, 100):
                got.add(message.body)
                worker.ack(message.lease_id)
        return got


def scene_keys(client: "redis.Redis") -> list[str]:
    Scene(client)
    used = [key.decode() for key in client.keys("*")]
    return sorted({*used, *LISTS, *(sorted_ids_key(name) for name in LISTS)})


@contextmanager
def replaced(client: "redis.Redis", key: str, kind: str) -> Iterator[None]:
    """Give the key a value of another type for a while."""
    kept, seconds = client.dump(key), max(client.pttl(key), 0)
    client.delete(key)
    PUT[kind](client, key)
    yield
    client.delete(key)
    if kept is not None:
        client.restore(key, seconds, kept)


def test_no_message_is_lost_while_a_key_has_the_wrong_type(client: "redis.Redis") -> None:
    keys = scene_keys(client)
    assert {
        leases_key(QUEUE),
        lease_bodies_key(QUEUE),
        lease_meta_key(QUEUE),
        lease_deliveries_key(QUEUE),
        lease_records_key(QUEUE),
    } <= set(keys)
    assert lease_requests_key(QUEUE) in keys
    assert {dead_letters_key(QUEUE), waiting_key(QUEUE), tenant_ids_key(QUEUE, "a"), queue_lists(QUEUE)[2]} <= set(keys)
    assert {deadlines_key(QUEUE), tenant_deadlines_key(QUEUE, "a")} <= set(keys)
    for key in keys:
        for kind in PUT:
            scene = Scene(client)
            if client.type(key).decode() == kind:
                continue
            with replaced(client, key, kind):
                scene.operate()
            missing = scene.messages - scene.acked - scene.drain()
            assert not missing, f"{len(missing)} message(s) lost with {key!r} as a {kind}"
            left = [name for name in client.keys("headrace:lease:*") if client.type(name) != b"none"]
            assert left == [], f"{left} left after {key!r} was a {kind}"


def test_queue_levels_report_the_queue_whose_key_has_the_wrong_type(client: "redis.Redis") -> None:
    Scene(client)
    other = "headrace.other"
    of_queue = (lease_meta_key(QUEUE), lease_requests_key(QUEUE), dead_letters_key(QUEUE))
    for key in (*of_queue, LISTS[0], LISTS[3]):
        reader = QueueLevelReader(client)
        with replaced(client, key, "stream"):
            levels = reader.read([QUEUE, other])
        shown = key.replace("\x06\x16", " ")
        assert f"WRONGTYPE the key {shown} holds a stream" in str(levels[QUEUE].problem)
        assert levels[other].problem is None
        assert reader.read([QUEUE, other])[QUEUE].problem is None
        assert levels[QUEUE].leased > 0


def test_other_queues_are_served_while_one_has_a_key_of_the_wrong_type(client: "redis.Redis") -> None:
    keys = (LISTS[0], sorted_ids_key(LISTS[0]), tenant_ids_key(LISTS[0], "a"), tenant_ids_key(LISTS[0], ""))
    for key in (*keys, lease_meta_key(QUEUE), dead_letters_key(QUEUE)):
        client.flushall()
        refused: dict[str, Exception] = {}
        leases = WorkerLeases(make_leases(client), {})
        client.set(key, "x")
        if key != LISTS[0]:
            client.lpush(LISTS[0], envelope("mine", "a"))
        client.lpush("headrace.other", envelope("theirs", "a"))
        rounds = leases.fetch_in_rounds([QUEUE, "headrace.other"], 9, on_error=refused.__setitem__)
        served = [message for messages in rounds for message in messages]
        assert envelope("theirs", "a").encode() in [message.body for message in served]
        assert refused.keys() == ({QUEUE} if key not in keys[2:4] else set())
        assert (len(served) == 2) == key.startswith("headrace:queue:of:")  # a tenant without a place shares one


def test_a_worker_can_start_on_a_queue_whose_keys_have_the_wrong_type(client: "redis.Redis") -> None:
    for key in (LISTS[0], sorted_ids_key(LISTS[1])):
        client.flushall()
        client.set(key, "x")
        with Connection(url_of(client), transport=LEASE_TRANSPORT) as connection:
            assert connection.channel().queue_declare(QUEUE).message_count == 0


def test_a_message_that_cannot_be_sorted_stays_first_and_is_reported(client: "redis.Redis") -> None:
    client.flushall()
    leases = make_leases(client)
    client.set(tenant_ids_key(QUEUE, ""), "x")
    client.lpush(LISTS[0], envelope("first"), envelope("second"))
    for attempt in (lambda: leases.fetch(LISTS, 9), lambda: leases.sort(LISTS)):
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            attempt()
    client.delete(tenant_ids_key(QUEUE, ""))
    assert names(leases.fetch(LISTS, 9)) == ["first", "second"]


def test_a_message_whose_shared_place_has_the_wrong_type_stays_in_its_list(client: "redis.Redis") -> None:
    client.flushall()
    leases = make_leases(client)
    client.zadd(waiting_key(QUEUE), {f"tenant-{number}": 1 for number in range(1000)})
    client.zadd(f"headrace:queue:tenants:{QUEUE}", {"tenant-0": 1})
    client.set(tenant_ids_key(QUEUE, ""), "x")
    client.lpush(LISTS[0], envelope("mine", "one more"))
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        leases.sort(LISTS)
    client.delete(tenant_ids_key(QUEUE, ""))
    assert names(leases.fetch(LISTS, 9)) == ["mine"]


@pytest.mark.parametrize("stored", ["123", '"text"', "null", "[]", "true"])
def test_a_message_is_not_lost_if_the_stored_one_before_it_is_malformed(client: "redis.Redis", stored: str) -> None:
    client.flushall()
    leases = make_leases(client)
    client.lpush(LISTS[0], envelope("first", id="r"))
    [first] = leases.fetch(LISTS, 1)
    client.hset(lease_bodies_key(QUEUE), first.lease_id, stored)
    client.lpush(LISTS[0], envelope("second", id="r"))
    assert names(leases.fetch(LISTS, 9)) == ["second"]


@pytest.mark.parametrize(
    "key", [tenant_ids_key(QUEUE, "a"), waiting_key(QUEUE), deadlines_key(QUEUE), leases_key(QUEUE)]
)
def test_a_key_of_the_wrong_type_is_reported_if_nothing_can_be_taken(client: "redis.Redis", key: str) -> None:
    scene = Scene(client)
    with replaced(client, key, "hash"):
        refusals: list[str] = []
        scene.other.on_refused = refusals.append
        with suppress(redis.ResponseError):
            scene.other.fetch(LISTS, 100)  # of the others
        with pytest.raises(redis.ResponseError, match="WRONGTYPE the key"):
            scene.other.fetch(LISTS, 100)


def test_a_server_out_of_memory_loses_no_message(client: "redis.Redis") -> None:
    scene = Scene(client)
    client.config_set("maxmemory", 1)
    try:
        scene.operate()
    finally:
        client.config_set("maxmemory", 0)
    assert scene.messages - scene.acked - scene.drain() == set()


def test_a_server_that_refuses_writes_loses_no_message(client: "redis.Redis") -> None:
    scene = Scene(client)
    client.replicaof("127.0.0.1", "1")  # it has no master: it keeps its data
    try:
        scene.operate()
    finally:
        client.replicaof("NO", "ONE")
    assert scene.messages - scene.acked - scene.drain() == set()


def test_a_dead_letter_that_cannot_be_read_is_listed_and_can_be_deleted(client: "redis.Redis") -> None:
    Scene(client)
    client.lpush(dead_letters_key(QUEUE), b"\xc1", msgpack.packb({"reason": "x"}), msgpack.packb([1]))
    unreadable = [letter for letter in dead_letters(client, QUEUE) if letter.reason.startswith("unreadable")]
    assert len(unreadable) == 3
    assert requeue(client, unreadable) == []
    assert purge(client, unreadable) == 3


GARBAGE: Final = {
    "no msgpack": b"\xc1\xff",
    "cut off": msgpack.packb({"list": QUEUE, "level": QUEUE})[:-3],
    "no map": msgpack.packb(7),
    "empty": b"",
    "of another queue": msgpack.packb({"list": "x", "level": "y", "tenant": "a", "since": 1.0}),
    "wrong values": msgpack.packb({"list": 1, "level": [], "tenant": None, "since": "soon"}),
    "endless charge": msgpack.packb(
        {"list": QUEUE, "level": QUEUE, "tenant": "a", "since": 1.0, "charge": float("inf"), "weight": 0}
    ),
    "text": b"nonsense",
    "huge": b"9223372036854775807",
}


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize(
    "key",
    [
        *(lease_meta_key(QUEUE), lease_records_key(QUEUE), lease_requests_key(QUEUE), lease_deliveries_key(QUEUE)),
        *("headrace:share:clock", "headrace:share:mean"),
    ],
)
def test_invalid_values_lose_no_message(client: "redis.Redis", key: str, garbage: str) -> None:
    scene = Scene(client)
    for name in client.hkeys(key):
        client.hset(key, name, GARBAGE[garbage])
    scene.operate()
    assert scene.messages - scene.acked - scene.drain() == set()


def test_a_message_whose_lease_names_no_list_goes_back_to_the_right_one(client: "redis.Redis") -> None:
    scene = Scene(client)
    for meta in (scene.holder.owner + "|", "|", "nobody", ""):
        for message in scene.held:
            client.hset(lease_meta_key(QUEUE), message.lease_id, meta)
        scene.holder.requeue(scene.held[0].lease_id)
        assert scene.messages - scene.drain() == set()
        scene = Scene(client)


@pytest.mark.parametrize("score", ["inf", "-inf", "1e308", "-1e308"])
def test_infinite_scores_lose_no_message(client: "redis.Redis", score: str) -> None:
    for key in [name for name in scene_keys(client) if client.type(name) == b"zset"]:
        scene = Scene(client)
        if client.type(key) == b"zset":
            client.zadd(key, dict.fromkeys(client.zrange(key, 0, -1), score))  # type: ignore[arg-type]
        scene.operate()
        assert scene.messages - scene.acked - scene.drain() == set(), key


def test_a_deleted_key_loses_no_message_that_other_keys_still_hold(client: "redis.Redis") -> None:
    holds_messages = {lease_bodies_key(QUEUE), dead_letters_key(QUEUE), *LISTS}
    for key in [name for name in scene_keys(client) if name not in holds_messages]:
        scene = Scene(client)
        client.delete(key)
        scene.operate()
        assert scene.messages - scene.acked - scene.drain() == set(), key


def test_foreign_entries_in_keys_of_the_right_type_are_skipped(client: "redis.Redis") -> None:
    for key in scene_keys(client):
        scene = Scene(client)
        kind = client.type(key).decode()
        if key not in LISTS and kind != "none":
            PUT[kind](client, key)
        scene.operate()
        assert scene.messages - scene.acked - scene.drain() == set(), key
        assert all(letter.reason for letter in dead_letters(client, QUEUE))
