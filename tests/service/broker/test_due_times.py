"""The header `due` on a real server: the message with the least slack is next, and one that must start now moves up."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import redis

from headrace_broker.client.client import Client
from headrace_broker.keys import (
    STREAM_SERVERS_KEY,
    latest_starts_key,
    lease_records_key,
    mean_cost_key,
    step_of,
    tenant_ids_key,
)
from headrace_broker.queue.leased_message import LeasedMessage
from headrace_broker.queue.leases import Leases
from headrace_broker.queue.levels import read_tenant_level
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.server.stream_table import StreamServerRow
from service.broker.tenant_messages import LISTS, QUEUE, envelope, name_of, names, take

STARTS = latest_starts_key(QUEUE)
HOUR = 3600


def now(client: "redis.Redis") -> float:
    seconds, microseconds = client.time()
    return seconds + microseconds / 1e6


def push(
    client: "redis.Redis", name: str, due: float | None = None, *, step: int = 0, tenant: str = "a", **headers: Any
) -> None:
    """Send a message that is due in so many seconds; None: it has no due time."""
    if due is not None:
        headers["due"] = now(client) + due
    client.lpush(LISTS[step], envelope(name, tenant, **headers))


def set_cost(client: "redis.Redis", leases: Leases, *, tokens: float, token_seconds: float) -> None:
    """Let requests cost so many tokens, and take so long for one."""
    client.set(mean_cost_key(QUEUE), tokens)
    leases.token_seconds = lambda: token_seconds


def push_mixed(client: "redis.Redis") -> None:
    push(client, "8 h", 8 * HOUR)
    push(client, "none 0")
    push(client, "2 h", 2 * HOUR)
    push(client, "none 1")
    push(client, "5 h", 5 * HOUR)


IN_ORDER = ["2 h", "none 0", "5 h", "none 1", "8 h"]


def test_messages_without_a_due_time_keep_their_places_and_of_the_others_the_least_slack_is_next(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    push_mixed(redis_client)
    assert names(take(make_leases(), 9)) == IN_ORDER
    assert redis_client.keys("headrace:queue:*") == []


def test_slack_is_by_the_cost_of_the_tenants_requests_and_the_measured_speed(redis_client: "redis.Redis") -> None:
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=5)
    push(redis_client, "other")
    leases.token_seconds = lambda: 0.5
    (other,) = take(leases)
    leases.cost(other.lease_id, 100)
    leases.ack(other.lease_id)
    push(redis_client, "a", HOUR)
    leases.sort(LISTS)
    ((_, start),) = redis_client.zrange(STARTS, 0, -1, withscores=True)
    assert HOUR - 101 < start / 1e6 - now(redis_client) <= HOUR - 100  # twice 100 tokens of half a second


def test_a_message_that_must_start_passes_those_of_higher_steps_but_not_of_the_highest(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    push(redis_client, "far", HOUR, step=3)
    push(redis_client, "now", 0.5, step=3)
    push(redis_client, "step 6", step=2, tenant="b")
    push(redis_client, "step 3", step=1)
    push(redis_client, "chat")
    messages = take(make_leases(), 9)
    assert names(messages) == ["chat", "now", "step 3", "step 6", "far"]
    assert [(step_of(each.list_name), each.step) for each in messages] == [(0, 0), (3, 3), (3, 3), (6, 6), (9, 9)]
    assert redis_client.keys("headrace:queue:*") == []


def test_a_message_moves_up_when_its_time_has_come(redis_client: "redis.Redis") -> None:
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=5)
    told: list[float] = []
    leases.on_due = told.append
    set_cost(redis_client, leases, tokens=10, token_seconds=1e-4)
    push(redis_client, "due", 0.3, step=3)
    push(redis_client, "urgent", 0.1, step=3)
    leases.sort(LISTS)
    assert redis_client.zcard(STARTS) == 2
    assert 0 <= told[-1] < 0.1
    while now(redis_client) < redis_client.zrange(STARTS, 0, 0, withscores=True)[0][1] / 1e6:
        pass
    assert names(leases.fetch(LISTS, 1, taken_from=2)) == ["urgent"]
    assert 0 <= told[-1] < 0.3
    assert redis_client.zcard(STARTS) == 1


def test_only_a_message_that_must_start_may_preempt(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases()
    push(redis_client, "none", step=3)
    push(redis_client, "far", HOUR, step=3)
    assert leases.fetch(LISTS, 4, taken_from=3) == []
    push(redis_client, "now", -5, step=3)
    (message,) = leases.fetch(LISTS, 4, taken_from=3)
    assert (name_of(message), step_of(message.list_name)) == ("now", 3)
    push(redis_client, "top", -5, step=3)
    assert leases.fetch(LISTS, 4, taken_from=1) == []  # those of step 3 run already: it preempts none of them


def test_of_many_that_are_due_together_the_first_start_early_enough_for_the_last(redis_client: "redis.Redis") -> None:
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=5)
    set_cost(redis_client, leases, tokens=10, token_seconds=1)  # 10 s each, one after the other: 400 s in all
    for number in range(40):
        push(redis_client, str(number), 450, step=3)
    push(redis_client, "step 6", step=2)
    (first,) = take(leases)
    assert name_of(first) == "step 6"
    leases.ack(first.lease_id)
    for number in range(40, 60):
        push(redis_client, str(number), 450, step=3)
    push(redis_client, "step 6 again", step=2)
    assert names(leases.fetch(LISTS, 1)) == ["0"]
    assert redis_client.zcard(STARTS) == 59  # no more move up than the fetch can take
    assert names(leases.fetch(LISTS, 10)) == ["step 6 again", *map(str, range(1, 10))]  # ten at once: in 60 s


def test_an_urgent_message_is_before_all_others_of_its_tenant_and_tenants_share_as_before(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    for number in range(3):
        push(redis_client, f"a{number}", step=1)
        push(redis_client, f"b{number}", step=1, tenant="b")
    push(redis_client, "a late", -60, step=1)
    push(redis_client, "a later", -50, step=3)
    taken = names(take(make_leases(), 9))
    assert [name for name in taken if name[0] == "a"] == ["a late", "a later", "a0", "a1", "a2"]
    assert {name[0] for name in taken[:2]} == {name[0] for name in taken[2:4]} == {"a", "b"}


def test_a_message_that_can_no_longer_end_in_time_is_behind_the_urgent_ones_and_before_all_others(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases()
    push(redis_client, "none", step=1)
    push(redis_client, "late", 5, step=3)  # it takes 12.8 s
    push(redis_client, "urgent", 20, step=3)  # it gets 25.6 s
    push(redis_client, "later", 5, step=3)
    push(redis_client, "far", 100, step=3)
    assert names(take(leases)) == ["urgent"]
    assert redis_client.zcard(STARTS) == 1
    assert names(take(leases, 9)) == ["late", "later", "none", "far"]


def test_messages_that_this_worker_cannot_take_keep_no_others_from_moving_up(redis_client: "redis.Redis") -> None:
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=5)
    set_cost(redis_client, leases, tokens=500, token_seconds=0.1)
    for name, count, drained in (("s1", 150, 2), ("s2", 1, None)):
        redis_client.hset(STREAM_SERVERS_KEY, name, StreamServerRow(1, None, name).pack())
        for number in range(count):
            push(redis_client, f"{number} on {name}", 60, step=3, id=f"{number} on {name}")
        while redis_client.llen(LISTS[3]):
            leases.sort(LISTS)
        redis_client.hset(STREAM_SERVERS_KEY, name, StreamServerRow(1, drained, name).pack())
    push(redis_client, "step 6", step=2)
    leases.away_homes = lambda: {"s1"}
    assert names(take(leases)) == ["0 on s2"]
    leases.away_homes = tuple
    assert names(take(leases)) == ["0 on s1"]


def test_late_work_takes_no_slot_from_the_highest_step_however_often_it_ages_or_is_preempted(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases()
    for number in range(9):
        push(redis_client, f"late {number}", -60, step=3)
    for _ in range(4):
        late = take(leases, 9)
        assert len(late) == 9
        for message in late:
            leases.requeue(message.lease_id, is_preempted=True)
    push(redis_client, "chat")
    assert names(take(leases)) == ["chat"]
    assert leases.fetch(LISTS, 9, taken_from=1) == []  # it preempts none of those that were sent with the highest step
    ageing = make_leases(ageing_seconds=1e-6)
    ageing.sort(LISTS)
    assert ageing.fetch(LISTS, 9, taken_from=1) == []
    assert len(ageing.fetch(LISTS, 4, taken_from=3)) == 4  # of the others it takes no more slots than the worker offers


def test_an_urgent_message_that_waits_for_too_long_is_late(redis_client: "redis.Redis") -> None:
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=5)
    push(redis_client, "chat")
    push(redis_client, "waits", 20, step=3)
    assert names(take(leases)) == ["chat"]  # the other one is urgent now
    assert redis_client.zcard(tenant_ids_key(LISTS[1], "a")) == redis_client.zcard(STARTS) == 1
    set_cost(redis_client, leases, tokens=500, token_seconds=0.1)
    push(redis_client, "urgent", 90, step=3)
    assert names(take(leases, 2)) == ["urgent", "waits"]


def test_a_message_that_returns_to_the_queue_keeps_its_order(redis_client: "redis.Redis") -> None:
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=50)
    push(redis_client, "now", -5)
    push_mixed(redis_client)
    urgent, _, _, fourth, _, last = take(leases, 6)
    leases.requeue(last.lease_id, is_preempted=True)
    leases.requeue(fourth.lease_id)
    assert redis_client.zcard(STARTS) == 2
    leases.requeue(urgent.lease_id, is_preempted=True)
    assert redis_client.zcard(STARTS) == 2
    assert names(take(leases, 9)) == ["now", "5 h", "8 h"]
    assert redis_client.keys("headrace:queue:*") == []


def test_the_messages_of_a_dead_worker_wait_in_the_order_of_their_slack(redis_client: "redis.Redis") -> None:
    push_mixed(redis_client)
    push(redis_client, "now", -5, step=3)
    assert len(Leases(redis_client, lease_seconds=0, delivery_limit=5).fetch(LISTS, 9)) == 6
    living = Leases(redis_client, lease_seconds=60, delivery_limit=5)
    living.reap(QUEUE)
    assert names(take(living, 9)) == [*IN_ORDER, "now"]


def test_a_message_that_was_postponed_is_still_due(redis_client: "redis.Redis") -> None:
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=5)
    push(redis_client, "due", HOUR)
    (message,) = take(leases)
    leases.postpone(message.lease_id, 0)
    leases.reap(QUEUE)
    assert redis_client.zcard(STARTS) == 1
    push(redis_client, "sooner", HOUR / 2)
    assert names(take(leases, 2)) == ["sooner", "due"]


def test_ageing_moves_a_message_with_a_due_time_like_any_other(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    push(redis_client, "due", HOUR, step=1)
    leases = make_leases(ageing_seconds=1e-6)
    leases.sort(LISTS)
    leases.sort(LISTS)
    assert redis_client.zcard(tenant_ids_key(QUEUE, "a")) == 1
    push(redis_client, "sooner", HOUR / 2)
    assert names(take(leases, 2)) == ["sooner", "due"]
    assert redis_client.keys("headrace:queue:*") == []


def test_a_late_message_that_aged_into_the_highest_step_is_not_before_its_chats(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    push(redis_client, "chat")
    push(redis_client, "late", -60, step=3)
    assert names(take(make_leases(ageing_seconds=1e-6), 2)) == ["chat", "late"]


def test_a_message_that_moves_up_begins_to_age_there(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases(ageing_seconds=1000)
    push(redis_client, "chat")
    push(redis_client, "now", -5, step=3)
    leases.sort(LISTS)
    (lease_id,) = redis_client.zrange(STARTS, 0, -1)
    list_key = f"headrace:queue:ids:{LISTS[3]}"
    redis_client.zadd(list_key, {lease_id: redis_client.zscore(list_key, lease_id) - 900e6})  # it waited for 900 s
    assert names(take(leases)) == ["chat"]
    ((_, since),) = redis_client.zrange(f"headrace:queue:ids:{LISTS[1]}", 0, -1, withscores=True)
    assert now(redis_client) - since / 1e6 < 100


def test_due_times_change_no_tenants_age(make_leases: Callable[..., Leases], redis_client: "redis.Redis") -> None:
    leases = make_leases()
    push(redis_client, "now", -5, step=3)
    push(redis_client, "late", 5, step=3)
    push(redis_client, "chat")
    assert names(take(leases)) == ["chat"]
    assert read_tenant_level(redis_client, QUEUE, "a", of_interest=1).oldest_age_seconds is None
    push(redis_client, "none", step=2)
    leases.sort(LISTS)
    age = read_tenant_level(redis_client, QUEUE, "a", of_interest=1).oldest_age_seconds
    assert age is not None
    assert age < 60


def test_a_due_time_of_our_client_is_the_one_that_it_was_given(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", make_leases: Callable[..., Leases]
) -> None:
    with Client(redis_server.url, check_model=False, model="m") as client:
        client.submit("a", due=600)
    (body,) = redis_client.lrange(QUEUE, 0, -1)
    assert 590 < json.loads(body)["headers"]["due"] - now(redis_client) <= 600
    make_leases().sort(LISTS)
    assert redis_client.zcard(STARTS) == 1


@pytest.mark.parametrize("header", [True, "60", "soon", [], {}, -1, 2**33 + 1, 1e300, None])
def test_a_message_whose_due_time_cannot_be_read_waits_without_one(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis", header: object
) -> None:
    redis_client.lpush(QUEUE, envelope("a", "t", due=header))
    make_leases().sort(LISTS)
    assert not redis_client.exists(STARTS)
    assert names(take(make_leases())) == ["a"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_due_time_that_is_not_finite_counts_as_none(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis", number: str
) -> None:
    redis_client.lpush(QUEUE, envelope("a", "t", due=7).replace(": 7", f": {number}"))
    make_leases().sort(LISTS)
    assert not redis_client.exists(STARTS)
    assert len(take(make_leases())) == 1


def test_purged_messages_leave_no_latest_starts(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    push_mixed(redis_client)
    leases = make_leases()
    leases.sort(LISTS)
    assert leases.purge(LISTS) == 5
    assert redis_client.keys("headrace:queue:*") == []


def test_latest_starts_of_messages_that_do_not_wait_are_removed(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases()
    push(redis_client, "taken", HOUR)
    (taken,) = take(leases)
    redis_client.zadd(STARTS, {taken.lease_id: 1.0, "unknown": 2.0})  # as workers of an earlier version leave them
    push(redis_client, "waits", HOUR, step=3)
    push(redis_client, "other", step=3, tenant="b")
    assert len(take(leases, 2)) == 2
    assert not redis_client.exists(STARTS)
    assert redis_client.hlen(lease_records_key(QUEUE)) == 3


def test_a_key_of_latest_starts_of_another_type_blocks_the_queue_and_is_reported(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    redis_client.set(STARTS, "x")
    push(redis_client, "a", 5)
    with pytest.raises(redis.ResponseError, match=f"{STARTS} holds a string, not a zset"):
        make_leases().fetch(LISTS, 1)
    redis_client.delete(STARTS)
    assert names(take(make_leases())) == ["a"]


@pytest.mark.parametrize("seed", range(5))
def test_no_message_is_lost_or_doubled_while_messages_move_up_and_return(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis", seed: int
) -> None:
    dice = random.Random(seed)
    workers = [
        make_leases(order=order, ageing_seconds=1e-6 * (number % 2))
        for number, order in enumerate(("arrival", "deadline") * 2)
    ]
    held: list[tuple[Leases, LeasedMessage]] = []
    done: list[str] = []
    sent = 0
    while len(done) < 200:
        if sent < 200 and dice.random() < 0.5:
            due = dice.choice([None, dice.uniform(-1, 1), dice.uniform(20, 40)])
            expires = dice.choice([{}, {"expires": "2100-01-01T00:00:00Z"}])
            push(redis_client, str(sent), due, step=dice.randrange(4), tenant=dice.choice("abc"), **expires)
            sent += 1
        worker = dice.choice(workers)
        limits = {"taken_from": dice.randrange(1, 4)} if dice.random() < 0.3 else {}
        held += [(worker, message) for message in worker.fetch(LISTS, dice.randrange(4), **limits)]
        assert len({message.lease_id for _, message in held}) == len(held)
        if held:
            holder, message = held.pop(dice.randrange(len(held)))
            holder.hold(message.lease_id, message)
            outcome = dice.random()
            if outcome < 0.5:
                holder.ack(message.lease_id)
                done.append(name_of(message))
            elif outcome < 0.8:
                holder.requeue(message.lease_id, is_preempted=outcome < 0.6)
            else:
                holder.postpone(message.lease_id, 0, keeps_place=outcome < 0.9)
                holder.reap(QUEUE)
    assert sorted(done, key=int) == [str(number) for number in range(200)]
    assert redis_client.keys("headrace:queue:*") == []
