"""Tenants share a queue by tokens and weight, against a real server."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kombu import Connection, Producer

from headrace_broker.app import LEASE_TRANSPORT
from headrace_broker.keys import (
    delayed_key,
    delayed_tenants_key,
    held_key,
    lease_bodies_key,
    lease_records_key,
    leases_key,
    sorted_ids_key,
    waiting_key,
    wake_up_key,
)
from headrace_broker.queue.dead_letters import dead_letters
from headrace_broker.queue.leased_message import LeasedMessage
from headrace_broker.queue.leases import Leases
from headrace_broker.queue.levels import QueueLevelReader
from headrace_broker.server.embedded import EmbeddedServer
from headrace_wire.questions import MAX_QUESTIONS
from service.broker.tenant_messages import LISTS, QUEUE, envelope, name_of, names, numbered, push, take, tenant_of


def serve(leases: Leases, costs: Mapping[str, int], requests: int) -> Counter[str]:
    """Run requests one after the other; return the tokens that each tenant got."""
    tokens = Counter[str]()
    for _ in range(requests):
        for message in take(leases):
            tenant = tenant_of(message)
            tokens[tenant] += costs[tenant]
            leases.cost(message.lease_id, costs[tenant])
            leases.ack(message.lease_id)
    return tokens


def test_a_light_tenants_request_overtakes_a_heavy_tenants_backlog(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases()
    push(redis_client, "heavy", numbered("h", 300))
    assert names(take(leases, 3)) == ["h0", "h1", "h2"]
    push(redis_client, "light", ["l0"])
    assert names(take(leases, 2)) == ["l0", "h3"]


def test_tenants_get_equal_tokens_whatever_the_number_of_requests(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    push(redis_client, "long", numbered("a", 200))
    push(redis_client, "short", numbered("b", 400))
    tokens = serve(make_leases(), {"long": 900, "short": 100}, requests=300)
    assert tokens["long"] / tokens["short"] == pytest.approx(1, abs=0.1)


def test_tokens_are_shared_by_weight(make_leases: Callable[..., Leases], redis_client: "redis.Redis") -> None:
    for tenant in ("acme", "béta", "gamma"):
        push(redis_client, tenant, numbered(tenant, 200))
    costs = {"acme": 100, "béta": 100, "gamma": 100}
    tokens = serve(make_leases(weights={"acme": 4, "béta": 2}), costs, requests=210)
    assert tokens["acme"] / tokens["gamma"] == pytest.approx(4, rel=0.1)
    assert tokens["béta"] / tokens["gamma"] == pytest.approx(2, rel=0.1)


def test_a_tenant_gathers_no_service_while_it_is_idle(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases, costs = make_leases(), {"busy": 100, "idle": 100}
    push(redis_client, "idle", ["early"])
    push(redis_client, "busy", numbered("b", 200))
    serve(leases, costs, requests=100)
    push(redis_client, "idle", numbered("i", 100))
    tokens = serve(leases, costs, requests=40)
    assert tokens["idle"] == pytest.approx(tokens["busy"], abs=200)


def test_a_tenant_that_arrives_at_an_empty_queue_starts_at_the_virtual_time(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases, costs = make_leases(), {"first": 100, "second": 100}
    push(redis_client, "first", numbered("f", 50))
    serve(leases, costs, requests=50)
    push(redis_client, "second", numbered("s", 100))
    push(redis_client, "first", numbered("g", 100))
    tokens = serve(leases, costs, requests=40)
    assert tokens["first"] == pytest.approx(tokens["second"], abs=200)


def test_the_actual_cost_of_a_request_replaces_the_estimate(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases()
    push(redis_client, "a", numbered("a", 5))
    push(redis_client, "b", numbered("b", 5))
    by_tenant = {tenant_of(message): message for message in take(leases, 2)}
    for tenant, tokens in (("a", 10_000), ("b", 10)):
        leases.cost(by_tenant[tenant].lease_id, tokens)
        leases.ack(by_tenant[tenant].lease_id)
    assert names(take(leases, 4)) == ["b1", "b2", "b3", "b4"]


def test_requests_that_never_ran_are_not_charged(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    push(redis_client, "refused", numbered("r", 50))
    push(redis_client, "served", numbered("s", 50))
    tokens = serve(make_leases(), {"refused": 0, "served": 100}, requests=52)
    assert tokens["served"] <= 200


def test_a_request_that_was_handed_back_is_its_tenants_next_and_not_charged_twice(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases()
    push(redis_client, "a", numbered("a", 5))
    push(redis_client, "b", numbered("b", 5))
    for _ in range(10):
        (first,) = take(leases)
        assert name_of(first) == "a0"
        leases.requeue(first.lease_id)
    taken = names(take(leases, 4))
    assert sorted(taken) == ["a0", "a1", "b0", "b1"]


def test_the_requests_of_a_silent_worker_return_in_their_old_order(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    silent, other = make_leases(), make_leases()
    push(redis_client, "a", numbered("a", 4))
    push(redis_client, "b", numbered("b", 4))
    held = names(silent.fetch(LISTS, 4))
    assert sorted(held) == ["a0", "a1", "b0", "b1"]
    for lease_id in redis_client.zrange(leases_key(QUEUE), 0, -1):
        redis_client.zadd(leases_key(QUEUE), {lease_id: 1})
    assert other.reap(QUEUE) == 4
    again = names(take(other, 8))
    for tenant in "ab":
        assert [name for name in again if name[0] == tenant] == numbered(tenant, 4)
    assert set(again[:4]) == set(held)


def test_a_better_priority_takes_precedence_over_fair_share(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    push(redis_client, "light", ["later"], step=2)
    push(redis_client, "heavy", numbered("h", 3))
    assert names(take(make_leases(), 4)) == ["h0", "h1", "h2", "later"]


def test_all_workers_use_the_same_service_of_a_tenant(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    one, two = make_leases(), make_leases()
    push(redis_client, "a", numbered("a", 100))
    push(redis_client, "b", numbered("b", 100))
    tokens = Counter[str]()
    for _ in range(25):
        tokens += serve(one, {"a": 300, "b": 100}, requests=1)
        tokens += serve(two, {"a": 300, "b": 100}, requests=1)
    assert tokens["a"] / tokens["b"] == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize(
    "tenant", [5, True, ["x"], {"x": 1}, "x" * 100_000, "new\nline", "nul\0", "", '"tenant": "other"', "\ud800", "ünï"]
)
def test_a_message_with_an_odd_tenant_is_delivered(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis", tenant: Any
) -> None:
    body = envelope("x", tenant)
    redis_client.lpush(QUEUE, body)
    (message,) = take(make_leases())
    assert message.body == body.encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\x00\xfe",
        b'"headers":',
        b'{"headers": ' + b'{"tenant": ' * 5000,
        b'{"headers": {"tenant": "x"',
        b'{"headers": [1], "tenant": "x"}',
        b'{"headers": 1e999}',
        b'{"a": {"headers": {"tenant": "x"}}}',
        b'{"headers": {"x": [' + b"0," * 200_000 + b"0]}}",
    ],
)
def test_a_message_that_cannot_be_read_counts_for_no_tenant_and_is_delivered(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis", body: bytes
) -> None:
    redis_client.lpush(QUEUE, body, envelope("after"))
    first, second = take(make_leases(), 2)
    assert (first.body, name_of(second)) == (body, "after")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    messages=st.lists(
        st.tuples(st.binary(max_size=40) | st.text(max_size=12).map(lambda text: envelope("x", text).encode())),
        max_size=12,
        unique=True,
    ),
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=8),
)
def test_every_message_is_delivered_once_and_byte_for_byte(
    make_leases: Callable[..., Leases],
    redis_client: "redis.Redis",
    messages: list[tuple[bytes]],
    counts: list[int],
) -> None:
    redis_client.flushall()
    leases = make_leases()
    for position, (body,) in enumerate(messages):
        redis_client.lpush(LISTS[position % 4], body)
    found: list[bytes] = []
    for count in [*counts, 100]:
        for message in take(leases, count):
            found.append(message.body)
            leases.ack(message.lease_id)
    assert sorted(found) == sorted(body for (body,) in messages)
    assert [key for key in redis_client.keys("headrace*") if not key.startswith(b"headrace:share:")] == []


def expire_leases(client: "redis.Redis") -> None:
    for lease_id in client.zrange(leases_key(QUEUE), 0, -1):
        client.zadd(leases_key(QUEUE), {lease_id: 1})


def check_agreement(client: "redis.Redis") -> None:
    """Check that keys with the same facts agree."""
    waiting = sum(score for _, score in client.zrange(waiting_key(QUEUE), 0, -1, withscores=True))
    assert waiting == sum(client.zcard(sorted_ids_key(name)) for name in LISTS)
    assert client.exists(wake_up_key(QUEUE)) == (waiting > 0)
    assert client.hlen(lease_bodies_key(QUEUE)) == client.hlen(lease_records_key(QUEUE))
    assert client.hlen(lease_bodies_key(QUEUE)) == waiting + client.zcard(leases_key(QUEUE))
    delayed = sum(client.zcard(delayed_key(name)) for name in LISTS)
    assert client.zcard(leases_key(QUEUE)) == delayed + sum(client.zcard(held_key(name)) for name in LISTS)
    assert delayed == sum(count for _, count in client.zrange(delayed_tenants_key(QUEUE), 0, -1, withscores=True))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.just("push"), st.sampled_from("abc"), st.integers(0, 3))
        | st.tuples(st.sampled_from(["take", "take aged"]), st.integers(0, 4))
        | st.tuples(st.sampled_from(["ack", "requeue", "requeue counted", "postpone", "fall silent"])),
        max_size=30,
    )
)
def test_after_any_sequence_of_events_each_message_is_done_once_and_all_keys_agree(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis", steps: list[tuple[Any, ...]]
) -> None:
    redis_client.flushall()
    leases = make_leases(quota=4)
    aged = make_leases(quota=4, ageing_seconds=1e-6, prefix_affinity=True)
    sent, done = 0, Counter[str]()
    held: list[tuple[Leases, LeasedMessage]] = []
    for action, *details in steps:
        if action == "push":
            tenant, step = details
            redis_client.lpush(LISTS[step], envelope(str(sent), tenant, prefix=str(sent % 2)))
            sent += 1
        elif action.startswith("take"):
            holder = aged if action == "take aged" else leases
            held += [(holder, message) for message in take(holder, details[0])]
        elif held and action == "fall silent":
            expire_leases(redis_client)
            leases.reap(QUEUE)
            held.clear()
        elif held:
            holder, message = held.pop(0)
            if action == "ack":
                holder.ack(message.lease_id)
                done[name_of(message)] += 1
            elif action == "postpone":
                holder.postpone(message.lease_id, 1000)
            else:
                holder.requeue(message.lease_id, is_counted=action == "requeue counted")
        check_agreement(redis_client)
    for holder, message in held:
        holder.ack(message.lease_id)
        done[name_of(message)] += 1
    expire_leases(redis_client)  # all delayed messages are due too
    leases.reap(QUEUE)
    while messages := take(leases, 100):
        for message in messages:
            leases.ack(message.lease_id)
            done[name_of(message)] += 1
    dead = [json.loads(letter.body)["body"] for letter in dead_letters(redis_client, QUEUE)]
    assert done + Counter(dead) == Counter(str(number) for number in range(sent))
    check_agreement(redis_client)
    assert redis_client.keys("headrace:lease:leases*") + redis_client.keys("headrace:queue:*") == []


def test_tenants_beyond_the_limit_share_one_place(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    for number in range(1100):
        redis_client.lpush(QUEUE, envelope(str(number), f"tenant {number}"))
    leases = make_leases(quota=3)
    redis_client.zadd(delayed_tenants_key(QUEUE), {"": 3})  # counts only for the quota of messages without a tenant
    assert leases.fetch(LISTS, 0) == []
    assert redis_client.zcard(waiting_key(QUEUE)) == 1001
    assert redis_client.zscore(waiting_key(QUEUE), "") == 100
    assert len(take(leases, 2000)) == 1100


def test_the_service_of_tenants_expires(make_leases: Callable[..., Leases], redis_client: "redis.Redis") -> None:
    leases = make_leases()
    push(redis_client, "a", ["x"])
    serve(leases, {"a": 10}, requests=1)
    kept = redis_client.keys("headrace:share:*")
    assert kept
    assert all(0 < redis_client.ttl(key) <= 86_400 for key in kept)


def test_ten_thousand_messages_are_sorted_by_short_scripts_and_none_is_lost(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    with redis_client.pipeline(transaction=False) as pipe:
        for number in range(10_000):
            pipe.lpush(LISTS[number % 4], envelope(str(number), f"t{number % 50}"))
        pipe.execute()
    redis_client.config_resetstat()
    leases = make_leases()
    while any(redis_client.llen(name) for name in LISTS):
        assert leases.fetch(LISTS, 0) == []
    calls = redis_client.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert 100 <= calls <= 110  # a hundred messages each
    assert sum(redis_client.zcard(sorted_ids_key(name)) for name in LISTS) == 10_000
    found = set()
    while messages := leases.fetch(LISTS, 500):
        found.update(names(messages))
    assert len(found) == 10_000


def test_sorted_messages_are_counted_and_dated_like_unsorted_ones(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    now = float(redis_client.time()[0])
    redis_client.lpush(LISTS[0], envelope("old", "a", enqueued_at=now - 50), envelope("new", "b", enqueued_at=now))
    push(redis_client, "b", ["other"], step=2)
    make_leases().fetch(LISTS, 0)
    redis_client.lpush(LISTS[0], envelope("unsorted", "a", enqueued_at=now))
    levels = QueueLevelReader(redis_client).read([QUEUE])[QUEUE]
    assert dict(levels.ready) == {0: 3, 3: 0, 6: 1, 9: 0}
    assert levels.oldest_age_seconds is not None
    assert 49 < levels.oldest_age_seconds < 80


def test_there_is_a_wake_up_token_exactly_while_sorted_messages_wait(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases()
    push(redis_client, "a", ["x", "y"])
    (first,) = take(leases)
    assert redis_client.llen(wake_up_key(QUEUE)) == 1
    (second,) = take(leases)
    assert redis_client.llen(wake_up_key(QUEUE)) == 0
    leases.requeue(first.lease_id)
    leases.requeue(second.lease_id)
    assert redis_client.llen(wake_up_key(QUEUE)) == 1
    take(leases, 2)
    assert redis_client.llen(wake_up_key(QUEUE)) == 0


@pytest.fixture
def connection(redis_server: EmbeddedServer) -> Iterator[Connection]:
    with Connection(redis_server.url, transport=LEASE_TRANSPORT) as connection:
        yield connection


def test_a_purge_deletes_sorted_messages_too_and_leaves_leased_ones(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis", connection: Connection
) -> None:
    leases = make_leases()
    push(redis_client, "a", numbered("a", 1200))
    (held,) = take(leases)
    push(redis_client, "b", ["unsorted"], step=3)
    channel = connection.channel()
    assert channel._size(QUEUE) == 1200
    assert channel.queue_purge(QUEUE) == 1200
    assert take(leases) == []
    leases.ack(held.lease_id)
    assert [key for key in redis_client.keys("headrace*") if not key.startswith(b"headrace:share:")] == []


def test_a_copy_of_a_waiting_message_becomes_a_dead_letter(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    push(redis_client, "a", ["x", "x", "y"])
    assert names(take(make_leases(), 3)) == ["x", "y"]
    assert [letter.reason for letter in dead_letters(redis_client, QUEUE)] == ["duplicate"]


def test_keys_that_are_deleted_by_hand_do_not_stop_the_queue(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases()
    push(redis_client, "a", numbered("a", 3))
    push(redis_client, "b", numbered("b", 3))
    leases.fetch(LISTS, 0)
    redis_client.delete(f"headrace:queue:of:{QUEUE}\x06a")
    redis_client.delete(lease_records_key(QUEUE))
    push(redis_client, "c", ["c0"])
    assert names(take(leases, 9)) == ["c0"]
    assert redis_client.llen(wake_up_key(QUEUE)) == 0


def test_a_message_without_headers_is_served_like_a_tenants(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis", redis_server: EmbeddedServer
) -> None:
    with Connection(redis_server.url) as connection:
        Producer(connection).publish("plain", routing_key=QUEUE, exchange="", serializer="json")
    push(redis_client, "a", numbered("a", 3))
    assert len(take(make_leases(), 4)) == 4


def push_choices(client: "redis.Redis", tenant: str, names: list[str], choices: Any, *, step: int = 0) -> None:
    for name in names:
        client.lpush(LISTS[step], envelope(name, tenant, choices=choices))


def test_a_message_takes_a_slot_for_each_of_its_choices(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    push_choices(redis_client, "a", numbered("a", 9), 4)
    taken = take(make_leases(), 10)
    assert names(taken) == ["a0", "a1", "a2"]  # the last one exceeds the slots that are left
    assert [message.choices for message in taken] == [4, 4, 4]


@pytest.mark.parametrize("choices", [0, -1, 401, 1.5, "8", True, None, [8], 1e300])
def test_an_invalid_number_of_choices_counts_as_one(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis", choices: Any
) -> None:
    push_choices(redis_client, "a", ["a0", "a1", "a2"], choices)
    assert names(take(make_leases(), 2)) == ["a0", "a1"]


@pytest.mark.parametrize("choices", [64, MAX_QUESTIONS])
def test_a_message_with_the_most_choices_waits_until_it_may_be_split(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis", choices: int
) -> None:
    push_choices(redis_client, "a", ["large"], choices)
    leases = make_leases()
    assert leases.fetch(LISTS, 4, split_from=0) == []
    assert [message.choices for message in leases.fetch(LISTS, 4)] == [choices]


def test_while_large_messages_may_not_be_split_smaller_ones_of_other_tenants_pass_them(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases()
    push_choices(redis_client, "large", numbered("large", 3), 64)
    push(redis_client, "small", numbered("small", 3))
    push_choices(redis_client, "large", ["better"], 64, step=0)
    assert names(leases.fetch(LISTS, 4, split_from=0)) == numbered("small", 3)
    assert leases.fetch(LISTS, 4, split_from=0) == []
    assert names(leases.fetch(LISTS, 4)) == ["large0"]


def test_only_messages_of_the_first_lists_are_split(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases()
    push_choices(redis_client, "a", ["worse"], 8, step=1)
    assert leases.fetch(LISTS, 4, split_from=1) == []
    push_choices(redis_client, "a", ["better"], 8)
    assert names(leases.fetch(LISTS, 4, split_from=1)) == ["better"]


def test_a_worker_corrects_the_choices_of_a_message_that_it_gives_back(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases()
    push(redis_client, "a", ["a0"])
    (message,) = take(leases)
    leases.requeue(message.lease_id, choices=8)
    assert leases.fetch(LISTS, 4, split_from=0) == []
    (message,) = leases.fetch(LISTS, 4)
    assert (message.choices, message.deliveries) == (8, 1)
