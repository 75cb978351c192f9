"""Leases against a real server: no message is lost, duplicated or left without a holder."""

import json
from collections.abc import Callable

import msgpack
import pytest
import redis

from clock import Clock
from headrace_broker.keys import (
    dead_letters_key,
    lease_bodies_key,
    lease_deliveries_key,
    lease_meta_key,
    lease_records_key,
    leases_key,
    queue_lists,
)
from headrace_broker.queue.dead_letters import DeadLetter, dead_letters
from headrace_broker.queue.leased_message import LeasedMessage
from headrace_broker.queue.leases import Leases
from headrace_broker.server.connections import connect
from headrace_wire.codes import DeadLetterReason
from service.servers import make_server

QUEUE = "headrace.m"
LISTS = queue_lists(QUEUE)

MakeLeases = Callable[..., Leases]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_leases(redis_client: "redis.Redis", clock: Clock) -> MakeLeases:
    def make(lease_seconds: float = 60, delivery_limit: int = 5) -> Leases:
        return Leases(redis_client, lease_seconds=lease_seconds, delivery_limit=delivery_limit, clock=clock)

    return make


def push(client: "redis.Redis", *bodies: str | bytes, step: int = 0) -> None:
    for body in bodies:
        client.lpush(LISTS[step], body)


def take(leases: Leases, count: int = 10) -> list[LeasedMessage]:
    messages = leases.fetch(LISTS, count)
    for message in messages:
        leases.hold(message.lease_id, message)
    return messages


def bodies(messages: list[LeasedMessage]) -> list[bytes]:
    return [message.body for message in messages]


def expire_leases(client: "redis.Redis") -> None:
    """Let every lease expire now, as if its holder had stopped renewing it."""
    for lease_id in client.zrange(leases_key(QUEUE), 0, -1):
        client.zadd(leases_key(QUEUE), {lease_id: 1})


def traces(client: "redis.Redis") -> list[str]:
    keys = (
        leases_key(QUEUE),
        lease_bodies_key(QUEUE),
        lease_meta_key(QUEUE),
        lease_deliveries_key(QUEUE),
        lease_records_key(QUEUE),
    )
    return [key for key in keys if client.exists(key)]


def test_messages_come_oldest_first_and_urgent_ones_before_all(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    push(redis_client, "late", step=3)
    push(redis_client, "a", "b", "c")
    push(redis_client, "soon", step=1)
    leases = make_leases()
    assert bodies(take(leases, 2)) == [b"a", b"b"]
    (third, *rest) = take(leases)
    assert third == LeasedMessage(third.lease_id, QUEUE, b"c", 1)
    assert bodies(rest) == [b"soon", b"late"]
    assert rest[1].list_name == LISTS[3]
    assert len(leases) == 5


def test_a_fetch_takes_at_most_the_given_count(make_leases: MakeLeases, redis_client: "redis.Redis") -> None:
    push(redis_client, "a", "b", "c")
    assert len(take(make_leases(), 2)) == 2
    assert bodies(take(make_leases())) == [b"c"]


def test_an_acknowledged_message_leaves_no_trace(make_leases: MakeLeases, redis_client: "redis.Redis") -> None:
    push(redis_client, "a")
    leases = make_leases()
    (message,) = take(leases)
    leases.ack(message.lease_id)
    assert (traces(redis_client), len(leases), redis_client.llen(QUEUE)) == ([], 0, 0)


def test_a_message_survives_byte_for_byte(make_leases: MakeLeases, redis_client: "redis.Redis") -> None:
    body = b'{"args": [], "weird": 1e400, "raw": "\xff\x00|"}'
    push(redis_client, body, step=2)
    leases = make_leases()
    (message,) = take(leases)
    leases.requeue(message.lease_id)
    (again,) = take(leases)
    assert (again.body, again.list_name) == (body, LISTS[2])


def test_a_renewed_lease_does_not_expire(make_leases: MakeLeases, redis_client: "redis.Redis") -> None:
    push(redis_client, "a")
    leases, other = make_leases(), make_leases()
    take(leases)
    expire_leases(redis_client)
    leases.tick()
    assert other.reap(QUEUE) == 0
    assert redis_client.zscore(leases_key(QUEUE), redis_client.zrange(leases_key(QUEUE), 0, 0)[0]) == pytest.approx(
        redis_client.time()[0] + 60, abs=30
    )


def test_the_message_of_a_silent_worker_goes_to_another(make_leases: MakeLeases, redis_client: "redis.Redis") -> None:
    push(redis_client, "a", "b", "later")
    silent, other = make_leases(), make_leases()
    take(silent, 2)
    assert other.reap(QUEUE) == 0
    expire_leases(redis_client)
    assert other.reap(QUEUE) == 2
    messages = take(other)
    assert bodies(messages) == [b"a", b"b", b"later"]
    assert [message.deliveries for message in messages] == [2, 2, 1]


def test_a_worker_that_lost_its_lease_is_notified_and_cannot_settle_the_message(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    push(redis_client, "a")
    zombie, other = make_leases(), make_leases()
    lost: list[LeasedMessage] = []
    zombie.on_lost = lost.append
    (message,) = take(zombie)
    expire_leases(redis_client)
    other.reap(QUEUE)
    (again,) = take(other)
    zombie.ack(message.lease_id)
    zombie.requeue(message.lease_id)
    zombie.dead_letter(message.lease_id, DeadLetterReason.REJECTED, "spite")
    zombie.hold(message.lease_id, message)
    zombie.tick()
    assert lost == [message]
    assert len(zombie) == 0
    assert redis_client.llen(QUEUE) == 0
    assert dead_letters(redis_client, QUEUE) == []
    other.tick()
    assert len(other) == 1
    other.ack(again.lease_id)
    assert traces(redis_client) == []


def test_a_worker_that_gets_its_own_lost_message_again_is_notified_first(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    push(redis_client, "a")
    leases, other = make_leases(), make_leases()
    lost: list[LeasedMessage] = []
    leases.on_lost = lost.append
    (first,) = take(leases)
    expire_leases(redis_client)
    other.reap(QUEUE)
    (second,) = leases.fetch(LISTS, 1)
    assert lost == [first]
    assert second.deliveries == 2


def test_a_worker_that_slept_too_long_finds_its_lost_leases_before_it_fetches_or_reaps(
    make_leases: MakeLeases, redis_client: "redis.Redis", clock: Clock
) -> None:
    push(redis_client, "lost", "kept")
    sleeper, other = make_leases(), make_leases()
    lost: list[LeasedMessage] = []
    sleeper.on_lost = lost.append
    gone, kept = take(sleeper)
    redis_client.zadd(leases_key(QUEUE), {gone.lease_id: 1})
    other.reap(QUEUE)
    take(other)
    expire_leases(redis_client)
    clock.now += 61
    sleeper.reap(QUEUE)
    assert lost == [gone]
    assert len(sleeper) == 1
    assert redis_client.zscore(leases_key(QUEUE), kept.lease_id) > 1  # renewed, so not reaped by itself


def test_a_requeued_message_is_fetched_next_and_its_delivery_does_not_count(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    push(redis_client, "a", "b", "c")
    leases = make_leases(delivery_limit=1)
    for _ in range(3):
        first, second = take(leases, 2)
        assert (first.body, first.deliveries) == (b"a", 1)
        leases.requeue(second.lease_id)
        leases.requeue(first.lease_id)
    assert bodies(take(leases)) == [b"a", b"b", b"c"]


def test_a_delivery_requeued_as_counted_counts(make_leases: MakeLeases, redis_client: "redis.Redis") -> None:
    push(redis_client, "a")
    leases = make_leases()
    (message,) = take(leases)
    leases.requeue(message.lease_id, is_counted=True)
    assert take(leases)[0].deliveries == 2


def test_a_message_that_kills_every_worker_becomes_a_dead_letter(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    poison = '{"headers": {"id": "request-1"}}'
    push(redis_client, poison, step=1)
    worker = make_leases(delivery_limit=2)
    dead: list[DeadLetter] = []
    worker.on_dead_letter = dead.append
    for deliveries in (1, 2):
        (message,) = make_leases(delivery_limit=2).fetch(LISTS, 1)
        assert message.deliveries == deliveries
        expire_leases(redis_client)
        worker.reap(QUEUE)
    push(redis_client, "harmless")
    assert bodies(take(worker)) == [b"harmless"]
    (letter,) = dead
    assert (letter.reason, letter.request_id, letter.queue) == ("delivery limit", "request-1", QUEUE)
    (stored,) = dead_letters(redis_client, QUEUE)
    assert (stored.reason, stored.body, stored.deliveries) == ("delivery limit", poison.encode(), 2)
    assert stored.at == pytest.approx(redis_client.time()[0], abs=60)
    assert redis_client.hlen(lease_deliveries_key(QUEUE)) == 1  # only the harmless one's


def test_a_dead_letter_is_kept_with_its_reason(make_leases: MakeLeases, redis_client: "redis.Redis") -> None:
    garbage = b"\xff\xfe not json"
    push(redis_client, garbage)
    leases = make_leases()
    dead: list[DeadLetter] = []
    leases.on_dead_letter = dead.append
    (message,) = take(leases)
    leases.dead_letter(message.lease_id, DeadLetterReason.UNDECODABLE, "UnicodeDecodeError")
    (stored,) = dead_letters(redis_client, QUEUE)
    assert (stored.body, stored.reason, stored.request_id) == (garbage, "undecodable: UnicodeDecodeError", None)
    assert [letter.body for letter in dead] == [garbage]
    assert traces(redis_client) == []


@pytest.mark.parametrize(
    ("message", "request_id"),
    [
        ('{"body": "%s", "headers": {"id": "r-1", "x": "}"}, "properties": {}}', "r-1"),  # in kombu's format
        ('{"headers": {"id": "r-2", "x": {}}, "body": "%s", "properties": {}}', "r-2"),
        ('{"headers": {"id": "r-3", "x": "' + 5000 * "y" + '"}, "body": "%s"}', "r-3"),
        ('{"headers": {"id": 4}, "body": "%s"}', None),
        ('{"body": "%s", "headers": {', None),
        ("no JSON %s", None),
    ],
)
def test_a_message_that_is_too_large_becomes_a_small_dead_letter_with_its_request_id(
    make_leases: MakeLeases, redis_client: "redis.Redis", message: str, request_id: str | None
) -> None:
    push(redis_client, message % ("x" * 8 * 1024 * 1024), "good")
    leases = make_leases()
    dead: list[DeadLetter] = []
    leases.on_dead_letter = dead.append
    assert bodies(take(leases)) == [b"good"]
    (stored,) = dead_letters(redis_client, QUEUE)
    assert [letter.request_id for letter in (*dead, stored)] == [request_id, request_id]
    assert (
        dead[0].reason
        == stored.reason
        == f"too large: {len(message) - 2 + 2**23} bytes of at most 8388608, not kept whole"
    )
    assert len(stored.packed) < 5000


def large(request_id: str, middle: str = "x") -> bytes:
    """Return a message with a lease id that does not cover its middle."""
    headers = json.dumps({"id": request_id})
    return f'{{"body": "{"a" * 2**20}{middle}{"b" * 2**20}", "headers": {headers}}}'.encode()


def test_a_large_message_is_sorted_and_taken_by_two_scripts(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    push(redis_client, large("r"))
    rounds = [bodies(messages) for messages in make_leases().fetch_in_rounds(LISTS, 10)]
    assert rounds == [[], [large("r")]]


@pytest.mark.parametrize(
    ("other", "reason"), [(large("r"), "duplicate"), (large("r", "y"), "duplicate id")], ids=["copy", "other middle"]
)
def test_a_large_message_does_not_replace_another_with_the_same_lease_id(
    make_leases: MakeLeases, redis_client: "redis.Redis", other: bytes, reason: str
) -> None:
    leases = make_leases()
    push(redis_client, large("r"), other)
    assert bodies(take(leases)) == [large("r")]
    push(redis_client, other, large("s"))
    assert bodies(take(leases)) == [large("s")]
    assert [(letter.reason, letter.body) for letter in dead_letters(redis_client, QUEUE)] == [(reason, other)] * 2


def test_large_messages_without_an_id_are_distinguished_by_their_middle(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    messages = [large("r", middle).replace(b"headers", b"footers") for middle in ("x", "y")]
    push(redis_client, *messages)
    leases = make_leases()
    assert bodies(take(leases) + take(leases)) == messages


def test_a_copy_of_a_leased_message_becomes_a_dead_letter_and_the_original_continues(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    push(redis_client, "a")
    leases = make_leases()
    dead: list[DeadLetter] = []
    leases.on_dead_letter = dead.append
    (message,) = take(leases)
    push(redis_client, "a", "b")
    assert bodies(take(leases)) == [b"b"]
    assert [letter.reason for letter in dead_letters(redis_client, QUEUE)] == [DeadLetterReason.DUPLICATE]
    assert dead == []  # or the worker would end the original's stream
    leases.ack(message.lease_id)
    assert redis_client.hget(lease_deliveries_key(QUEUE), message.lease_id) is None


def test_two_messages_with_one_delivery_tag_are_both_delivered(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    same_tag = '{"properties": {"delivery_tag": "t"}, "body": "%s"}'
    push(redis_client, same_tag % "one", same_tag % "two")
    leases = make_leases()
    first, second = take(leases)
    leases.ack(first.lease_id)
    leases.tick()
    assert len(leases) == 1
    leases.ack(second.lease_id)
    assert traces(redis_client) == []


def test_dead_letters_are_bounded(make_leases: MakeLeases, redis_client: "redis.Redis") -> None:
    leases = make_leases()
    redis_client.rpush(dead_letters_key(QUEUE), *[msgpack.packb({"old": number}) for number in range(1000)])
    push(redis_client, "a")
    leases.dead_letter(take(leases)[0].lease_id, DeadLetterReason.REJECTED)
    assert redis_client.llen(dead_letters_key(QUEUE)) == 1000
    assert dead_letters(redis_client, QUEUE, limit=1)[0].reason == DeadLetterReason.REJECTED


def test_a_flood_of_refused_messages_does_not_block_the_server(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    push(redis_client, "a")
    leases = make_leases()
    take(leases)
    redis_client.lpush(QUEUE, *["a"] * 10_000)
    assert leases.fetch(LISTS, 1) == []
    assert 5_000 < redis_client.llen(QUEUE) < 10_000


def test_failed_settlements_are_retried_when_the_server_is_back(clock: Clock) -> None:
    with make_server(appendonly=True) as server, connect(server.url) as client:
        leases = Leases(client, lease_seconds=60, delivery_limit=5, clock=clock)
        push(client, "done", "unfinished", "held")
        done, unfinished, held = take(leases)
        server.kill()
        leases.ack(done.lease_id)
        leases.requeue(unfinished.lease_id)
        leases.tick()
        assert len(leases) == 1
        server.start()
        leases.tick()
        assert client.zrange(leases_key(QUEUE), 0, -1) == [held.lease_id.encode()]
        assert bodies(take(leases)) == [b"unfinished"]


def test_after_an_outage_no_lease_is_reaped_for_the_length_of_a_lease(
    make_leases: MakeLeases, redis_client: "redis.Redis", clock: Clock
) -> None:
    push(redis_client, "a")
    other, leases = make_leases(), make_leases(lease_seconds=60)
    take(other)
    expire_leases(redis_client)
    leases.pause_reaping()
    clock.now += 59
    assert leases.reap(QUEUE) == 0
    clock.now += 2
    assert leases.reap(QUEUE) == 1


def test_after_refusals_no_lease_is_reaped_before_other_workers_had_time_to_renew(
    make_leases: MakeLeases, redis_client: "redis.Redis", clock: Clock
) -> None:
    holder, other = make_leases(), make_leases()
    push(redis_client, "x")
    (message,) = take(holder)
    redis_client.replicaof("127.0.0.1", "1")  # it has no master: it keeps its data and refuses writes
    try:
        for _ in range(3):
            with pytest.raises(redis.ReadOnlyError):
                other.reap(QUEUE)
            clock.now += 100
        holder.tick()
    finally:
        redis_client.replicaof("NO", "ONE")
    redis_client.zadd(leases_key(QUEUE), {message.lease_id: 1})  # it expired during the outage
    assert other.reap(QUEUE) == 0
    clock.now += 59
    assert other.reap(QUEUE) == 0
    holder.tick()
    clock.now += 2
    assert other.reap(QUEUE) == 0
    redis_client.zadd(leases_key(QUEUE), {message.lease_id: 1})
    assert other.reap(QUEUE) == 1


def test_a_postponed_message_is_held_by_no_worker_until_it_is_due_and_that_was_no_delivery(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    leases = make_leases(lease_seconds=1)
    push(redis_client, "later", "now")
    later, _ = take(leases)
    leases.postpone(later.lease_id, 3000)
    assert len(leases) == 1
    now = redis_client.time()[0]
    assert now + 2990 < redis_client.zscore(leases_key(QUEUE), later.lease_id) < now + 3010
    leases.tick()  # the worker that had it does not renew it
    leases.ack(later.lease_id)
    assert leases.reap(QUEUE) == 0
    redis_client.zadd(leases_key(QUEUE), {later.lease_id: 1})
    other = make_leases()
    assert other.reap(QUEUE) == 1
    [message] = take(other)
    assert (message.body, message.deliveries) == (b"later", 1)


def test_a_postponed_message_that_keeps_its_place_comes_before_later_ones_and_keeps_its_age(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    leases = make_leases()
    push(redis_client, "first", "second")
    [first] = take(leases, 1)
    before = msgpack.unpackb(redis_client.hget(lease_records_key(QUEUE), first.lease_id))
    leases.postpone(first.lease_id, 0, keeps_place=True)
    assert leases.reap(QUEUE) == 1
    after = msgpack.unpackb(redis_client.hget(lease_records_key(QUEUE), first.lease_id))
    assert [after.get(name) for name in ("since", "level", "due")] == [before["since"], before["level"], None]
    again, _ = take(leases)
    assert (again.body, again.deliveries) == (b"first", 1)


def test_a_postponement_that_redis_refused_is_retried(make_leases: MakeLeases, redis_client: "redis.Redis") -> None:
    leases = make_leases()
    push(redis_client, "later")
    [later] = take(leases)
    redis_client.config_set("maxmemory", 1)
    try:
        leases.postpone(later.lease_id, 3000)
    finally:
        redis_client.config_set("maxmemory", 0)
    assert redis_client.hget(lease_meta_key(QUEUE), later.lease_id).startswith(leases.owner.encode())
    leases.tick()
    assert redis_client.hget(lease_meta_key(QUEUE), later.lease_id).startswith(b"delayed|")


def test_a_settlement_that_fails_repeatedly_blocks_no_renewal_settlement_or_reaping(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    leases = make_leases()
    push(redis_client, "later", "kept", "done")
    later, kept, done = take(leases)
    expire_leases(redis_client)
    redis_client.replicaof("127.0.0.1", "1")  # it has no master: it keeps its data and refuses writes
    leases.postpone(later.lease_id, 3000)
    leases.ack(done.lease_id)
    redis_client.config_set("maxmemory", 1)  # only a postponement needs memory
    redis_client.replicaof("NO", "ONE")
    try:
        leases.tick()
        assert redis_client.zscore(leases_key(QUEUE), done.lease_id) is None
        assert redis_client.zscore(leases_key(QUEUE), kept.lease_id) > 1
        assert leases.reap(QUEUE) == 1
    finally:
        redis_client.config_set("maxmemory", 0)
    assert bodies(take(leases)) == [b"later"]
