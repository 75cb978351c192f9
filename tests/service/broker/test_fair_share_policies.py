"""Ageing, quotas and prefix affinity, on a real server."""

import json
from collections.abc import Callable, Iterable, Iterator

import msgpack
import pytest
import redis

from headrace_broker.client.client import Client
from headrace_broker.errors import QueueFullError, TenantQueueFullError
from headrace_broker.keys import (
    delayed_tenants_key,
    lease_bodies_key,
    lease_records_key,
    leases_key,
    sorted_ids_key,
    tenant_ids_key,
)
from headrace_broker.queue.leases import Leases
from headrace_broker.queue.levels import QueueLevelReader
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.settings import BrokerSettings
from service.broker.tenant_messages import LISTS, QUEUE, envelope, name_of, names, numbered, push, take


def test_an_old_message_is_served_under_a_constant_load_of_better_priority(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases(ageing_seconds=0.001)
    push(redis_client, "a", ["patient"], step=3)
    for number in range(10_000):
        push(redis_client, "a", [f"urgent {number}"])
        push(redis_client, "b", [f"pressing {number}"])
        (message,) = take(leases)
        if name_of(message) == "patient":
            assert message.list_name == LISTS[3]
            break
    else:
        pytest.fail("it starved")


def test_no_message_ages_too_early_or_without_ageing(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    push(redis_client, "a", ["patient"], step=3)
    push(redis_client, "a", numbered("u", 20))
    for leases in (make_leases(ageing_seconds=3600), make_leases()):
        assert all(name.startswith("u") for name in names(take(leases, 10)))


def shift(client: "redis.Redis", name: str, seconds: float) -> None:
    """Change the keys as if this message, the only one of its tenant at its level, had been sorted this much later."""
    for raw_id, packed in client.hgetall(lease_records_key(QUEUE)).items():
        record = msgpack.unpackb(packed)
        if json.loads(client.hget(lease_bodies_key(QUEUE), raw_id) or "")["body"] == name:
            record["since"] += int(seconds * 1e6)
            client.hset(lease_records_key(QUEUE), raw_id, msgpack.packb(record))
            client.zadd(sorted_ids_key(record["level"]), {raw_id: record["since"]})
            client.zadd(tenant_ids_key(record["level"], record["tenant"]), {raw_id: record["since"]})


def test_a_message_that_has_aged_counts_at_the_next_step_from_then_on(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases(ageing_seconds=3600)
    push(redis_client, "a", ["low"], step=3)
    push(redis_client, "a", ["before", "after"], step=2)
    leases.fetch(LISTS, 0)
    shift(redis_client, "low", -3601)
    shift(redis_client, "before", -10)
    leases.fetch(LISTS, 0)
    assert dict(QueueLevelReader(redis_client).read([QUEUE])[QUEUE].ready) == {0: 0, 3: 0, 6: 3, 9: 0}
    assert names(take(leases, 3)) == ["before", "low", "after"]


def test_a_very_old_message_takes_all_its_steps_at_once(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases(ageing_seconds=60)
    push(redis_client, "a", ["low"], step=3)
    leases.fetch(LISTS, 0)
    shift(redis_client, "low", -200)
    push(redis_client, "b", ["urgent"])
    leases.fetch(LISTS, 0)
    assert dict(QueueLevelReader(redis_client).read([QUEUE])[QUEUE].ready) == {0: 2, 3: 0, 6: 0, 9: 0}


def test_a_clock_that_is_set_back_does_not_reverse_the_order(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases()
    push(redis_client, "a", ["first"])
    leases.fetch(LISTS, 0)
    shift(redis_client, "first", 3600)
    push(redis_client, "a", ["second", "third"])
    assert names(take(leases, 3)) == ["first", "second", "third"]


def test_an_aged_message_that_is_requeued_keeps_its_step(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    push(redis_client, "a", ["low"], step=1)
    aged = make_leases(ageing_seconds=1e-6)
    aged.fetch(LISTS, 0)
    (message,) = take(aged)
    aged.requeue(message.lease_id)
    push(redis_client, "a", ["high"])
    assert names(take(make_leases(), 2)) == ["low", "high"]


def test_a_message_over_its_tenants_quota_is_handed_out_to_be_refused(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases(quota=3)
    push(redis_client, "greedy", numbered("g", 5), step=1)
    push(redis_client, "modest", ["m0"])
    taken = {name_of(message): message.over_quota for message in take(leases)}
    assert taken == {"m0": 0, "g3": 3, "g4": 3}
    push(redis_client, "greedy", ["g5"])
    assert {name_of(message): message.over_quota for message in take(leases)} == {"g5": 3, "g0": 0}
    push(redis_client, "greedy", ["g6"])
    assert names(take(leases, 9)) == ["g6", "g1", "g2"]


def test_a_message_whose_worker_died_before_refusing_it_is_checked_again(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    dying, other = make_leases(quota=1), make_leases(quota=1)
    push(redis_client, "a", ["a0", "a1"])
    assert [message.over_quota for message in dying.fetch(LISTS, 0)] == [1]
    for lease_id in redis_client.zrange(leases_key(QUEUE), 0, -1):
        redis_client.zadd(leases_key(QUEUE), {lease_id: 1})
    assert other.reap(QUEUE) == 1
    assert [(name_of(m), m.over_quota) for m in take(other, 0)] == [("a1", 1)]
    assert names(take(other)) == ["a0"]
    for lease_id in other.held():
        other.ack(lease_id)
    assert [key for key in redis_client.keys("headrace*") if not key.startswith(b"headrace:share:")] == []


def test_delayed_messages_count_in_their_tenants_quota_until_they_are_due(
    client: Client, make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases(quota=3)
    push(redis_client, "greedy", numbered("later", 2), step=1)
    for message in take(leases, 2):
        leases.postpone(message.lease_id, 3000)
    push(redis_client, "greedy", ["g0", "g1"])
    push(redis_client, "modest", ["m0"])
    assert {name_of(message): message.over_quota for message in take(leases, 0)} == {"g1": 3}
    with pytest.raises(TenantQueueFullError, match="holds 3 of at most 3 requests of tenant 'greedy'"):
        client.submit("x", tenant="greedy")
    for lease_id in redis_client.zrange(leases_key(QUEUE), 0, -1):
        redis_client.zadd(leases_key(QUEUE), {lease_id: 1})
    leases.reap(QUEUE)
    for lease_id, packed in redis_client.hgetall(
        lease_records_key(QUEUE)
    ).items():  # as a worker of an earlier version reaps
        record = msgpack.unpackb(packed) | {"delayed": True}
        redis_client.hset(lease_records_key(QUEUE), lease_id, msgpack.packb(record))
        redis_client.zincrby(delayed_tenants_key(QUEUE), 1, record["tenant"])
    assert sorted(names(take(leases, 9))) == ["g0", "g1", "later0", "later1", "m0"]
    client.submit_many([{"prompt": "x", "tenant": "greedy"}] * 3)


def test_a_flood_over_a_quota_does_not_overload_a_worker_or_delay_other_tenants(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases(quota=1)
    push(redis_client, "modest", ["m0"])
    redis_client.lpush(QUEUE, *[envelope(str(number), "flood") for number in range(1000)])
    messages = take(leases, 2)
    assert len(messages) <= 202
    assert "m0" in names(messages)
    assert redis_client.llen(QUEUE) > 700


def push_prefixes(client: "redis.Redis", prefixes: Iterable[str]) -> None:
    for number, prefix in enumerate(prefixes):
        client.lpush(QUEUE, envelope(f"{prefix}{number}", "a", prefix=prefix))


def had(leases: Leases, *prefixes: str) -> Leases:
    for prefix in prefixes:
        leases.remember_prefix(prefix)
    return leases


def test_workers_prefer_requests_with_their_recent_prefixes(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    one, two = had(make_leases(prefix_affinity=True), "p"), had(make_leases(prefix_affinity=True), "q")
    push_prefixes(redis_client, "pq" * 6)
    taken_by_two = [name for _ in range(6) for name in names(take(two))]
    taken_by_one = [name for _ in range(6) for name in names(take(one))]
    assert {name[0] for name in taken_by_one} == {"p"}
    assert {name[0] for name in taken_by_two} == {"q"}
    assert taken_by_one == sorted(taken_by_one, key=lambda name: int(name[1:]))


def test_affinity_skips_the_same_request_a_few_times_at_most(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = had(make_leases(prefix_affinity=True), "p")
    push_prefixes(redis_client, "q" + "p" * 30)
    taken = [name for _ in range(12) for name in names(take(leases))]
    assert taken.index("q0") == 8


def test_affinity_considers_only_the_next_tenant(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = had(make_leases(prefix_affinity=True), "p")
    redis_client.lpush(QUEUE, envelope("a0", "a"), envelope("b0", "b", prefix="p"), envelope("a1", "a", prefix="p"))
    assert names(take(leases)) == ["a1"]
    assert names(take(leases)) == ["b0"]


def test_without_affinity_prefixes_change_nothing(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    push_prefixes(redis_client, "qp" * 3)
    assert names(take(had(make_leases(), "p"), 6)) == ["q0", "p1", "q2", "p3", "q4", "p5"]


def test_a_worker_remembers_a_bounded_number_of_prefixes(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = had(make_leases(prefix_affinity=True), *(f"prefix {number}" for number in range(100)))
    leases.remember_prefix(["no", "text"])
    push_prefixes(redis_client, ["x", "prefix 0", "prefix 99"])
    assert names(take(leases)) == ["prefix 992"]
    assert names(take(leases)) == ["x0"]


@pytest.fixture
def client(redis_server: EmbeddedServer) -> Iterator[Client]:
    settings = BrokerSettings(redis_server.url, max_queued_requests_per_tenant=3)
    with Client(settings, model="m", check_model=False) as client:
        yield client


@pytest.mark.parametrize("is_sorted", [True, False])
def test_a_client_refuses_to_submit_above_its_tenants_quota(
    client: Client, make_leases: Callable[..., Leases], redis_client: "redis.Redis", is_sorted: bool
) -> None:
    client.submit_many([{"prompt": "x", "tenant": "béta", "priority": priority} for priority in (0, 9, 5)])
    client.submit("x")
    if is_sorted:
        make_leases().fetch(LISTS, 0)
    with pytest.raises(TenantQueueFullError, match="holds 3 of at most 3 requests of tenant 'béta'") as full:
        client.submit("x", tenant="béta")
    assert isinstance(full.value, QueueFullError)
    assert (full.value.retry_after_seconds is not None) == is_sorted
    client.submit("x", tenant="other")
    with pytest.raises(TenantQueueFullError, match="requests that name no tenant"):
        client.submit_many([{"prompt": "x"}] * 3)
    take(make_leases(), 10)
    client.submit("x", tenant="béta")
