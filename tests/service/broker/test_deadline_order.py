"""`--order deadline`: a tenant's messages are taken in the order of their deadlines, on a real server."""

import random
from collections.abc import Callable

import pytest
import redis

from headrace_broker.keys import deadlines_key, tenant_deadlines_key, tenant_ids_key
from headrace_broker.queue.dead_letters import dead_letters, requeue
from headrace_broker.queue.fair_share import ARRIVAL, DEADLINE, FairShare
from headrace_broker.queue.leased_message import LeasedMessage
from headrace_broker.queue.leases import Leases
from headrace_wire.codes import DeadLetterReason
from service.broker.tenant_messages import LISTS, QUEUE, envelope, name_of, names, take


def push(client: "redis.Redis", name: str, expires: int | None = None, *, step: int = 0, tenant: str = "a") -> None:
    """Send a message that expires this many days after the first of January 2100; None: never."""
    header = {} if expires is None else {"expires": f"2100-01-{1 + expires:02}T00:00:00+00:00"}
    client.lpush(LISTS[step], envelope(name, tenant, **header))


def make_one(client: "redis.Redis", *, lease_seconds: float = 60) -> Leases:
    """Return the leases of a worker with the setting."""
    return Leases(client, lease_seconds=lease_seconds, delivery_limit=50, fair_share=FairShare(order=DEADLINE))


def push_mixed(client: "redis.Redis") -> None:
    for name, expires in (("none 0", None), ("day 9", 9), ("day 2", 2), ("none 1", None), ("day 5", 5)):
        push(client, name, expires)


def test_the_earliest_deadline_is_first_and_messages_without_one_are_last_as_they_arrived(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    push_mixed(redis_client)
    assert names(take(make_leases(order=DEADLINE), 9)) == ["day 2", "day 5", "day 9", "none 0", "none 1"]
    assert redis_client.keys("headrace:queue:deadlines*") == []


def test_without_the_setting_deadlines_change_nothing(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    push_mixed(redis_client)
    assert names(take(make_leases(), 9)) == ["none 0", "day 9", "day 2", "none 1", "day 5"]
    assert redis_client.keys("headrace:queue:deadlines*") == []


def test_a_later_message_with_an_earlier_deadline_passes_sorted_ones(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases(order=DEADLINE)
    push_mixed(redis_client)
    assert names(take(leases)) == ["day 2"]
    push(redis_client, "day 1", 1)
    assert names(take(leases, 2)) == ["day 1", "day 5"]


def test_messages_of_one_deadline_are_all_taken_once(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    for number in range(20):
        push(redis_client, str(number), 3)
    assert sorted(names(take(make_leases(order=DEADLINE), 30)), key=int) == [str(number) for number in range(20)]


def test_tenants_share_as_before_and_priorities_are_first(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    for number in range(3):
        push(redis_client, f"a{number}", 1, tenant="a")
        push(redis_client, f"b{number}", 9, tenant="b")
        push(redis_client, f"c{number}", tenant="c")
    push(redis_client, "low", 0, step=1, tenant="d")
    taken = names(take(make_leases(order=DEADLINE), 10))
    assert [{name[0] for name in taken[at : at + 3]} for at in (0, 3, 6)] == [{"a", "b", "c"}] * 3
    assert taken[9] == "low"


def test_a_message_that_returns_to_the_queue_waits_in_the_order_of_its_deadline(redis_client: "redis.Redis") -> None:
    leases = make_one(redis_client)
    push_mixed(redis_client)
    first, second, third = take(leases, 3)
    leases.requeue(third.lease_id, is_preempted=True)
    leases.requeue(first.lease_id)
    leases.postpone(second.lease_id, 0)
    leases.reap(QUEUE)
    assert names(take(leases, 9)) == ["day 2", "day 5", "day 9", "none 0", "none 1"]


def test_the_messages_of_a_dead_worker_wait_in_the_order_of_their_deadlines(redis_client: "redis.Redis") -> None:
    push_mixed(redis_client)
    assert len(make_one(redis_client, lease_seconds=0).fetch(LISTS, 4)) == 4
    living = make_one(redis_client)
    living.reap(QUEUE)
    assert names(take(living, 9)) == ["day 2", "day 5", "day 9", "none 0", "none 1"]


def test_an_aged_message_takes_its_deadline_to_the_higher_step(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    push(redis_client, "day 5", 5)
    push(redis_client, "day 2", 2, step=1)
    leases = make_leases(order=DEADLINE, ageing_seconds=1e-6)
    leases.sort(LISTS)
    leases.sort(LISTS)
    assert names(take(leases, 2)) == ["day 2", "day 5"]


def test_a_dead_letter_that_is_requeued_has_its_deadline_again(redis_client: "redis.Redis") -> None:
    leases = make_one(redis_client)
    push(redis_client, "day 5", 5)
    push(redis_client, "day 2", 2)
    (dead,) = take(leases)
    leases.dead_letter(dead.lease_id, DeadLetterReason.REJECTED)
    leases.sort(LISTS)
    assert len(requeue(redis_client, dead_letters(redis_client, QUEUE))) == 1
    assert names(take(leases, 2)) == ["day 2", "day 5"]


def test_workers_of_both_settings_take_every_message_once_each_in_its_order(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    by_arrival, by_deadline = make_leases(), make_leases(order=DEADLINE)
    for number in range(8):
        push(redis_client, str(number), 20 - number)
    by_arrival.sort(LISTS)
    assert names(take(by_arrival, 2)) == ["0", "1"]
    assert names(take(by_deadline, 2)) == ["7", "6"]
    assert names(take(by_arrival, 2)) == ["2", "3"]
    assert names(take(by_deadline, 9)) == ["5", "4"]
    assert redis_client.keys("headrace:queue:deadlines*") == []


@pytest.mark.parametrize("seed", range(5))
def test_no_message_is_lost_or_doubled_while_workers_of_both_settings_return_and_drop_messages(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis", seed: int
) -> None:
    dice = random.Random(seed)
    workers = [
        make_leases(order=order, ageing_seconds=1e-6 * (number % 2))
        for number, order in enumerate((ARRIVAL, DEADLINE) * 2)
    ]
    held: list[tuple[Leases, LeasedMessage]] = []
    done: list[str] = []
    sent = 0
    while len(done) < 200:
        if sent < 200 and dice.random() < 0.5:
            expires = dice.choice([None, dice.randrange(28)])
            push(redis_client, str(sent), expires, step=dice.randrange(4), tenant=dice.choice("abc"))
            sent += 1
        worker = dice.choice(workers)
        taken = take(worker, dice.randrange(4))
        held += [(worker, message) for message in taken]
        assert len({message.lease_id for _, message in held}) == len(held)
        if held:
            holder, message = held.pop(dice.randrange(len(held)))
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


def test_deadlines_that_a_worker_of_an_earlier_version_left_are_passed_over_and_removed(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases(order=DEADLINE)
    push(redis_client, "day 5", 5)
    push(redis_client, "day 2", 2)
    push(redis_client, "day 7", 7)
    (taken,) = take(leases)
    for list_name in LISTS[:2]:
        redis_client.zadd(tenant_deadlines_key(list_name, "a"), {taken.lease_id: 1.0, "unknown": 2.0})
    push(redis_client, "day 9", 9)
    found = names(take(leases)) + names(take(leases))
    assert len(found) == 2
    assert redis_client.zcard(tenant_deadlines_key(LISTS[0], "a")) == 1
    found += names(take(leases))
    assert sorted(found) == ["day 5", "day 7", "day 9"]
    assert not redis_client.exists(tenant_deadlines_key(LISTS[0], "a"))
    push(redis_client, "later", step=1)
    assert names(take(leases)) == ["later"]
    assert redis_client.keys("headrace:queue:deadlines*") == []


def test_affinity_chooses_among_the_first_messages_in_the_order_of_deadlines(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases(order=DEADLINE, prefix_affinity=True)
    leases.remember_prefix("p")
    for name, day, prefix in (("p9", 9, "p"), ("q1", 1, "q"), ("p2", 2, "p"), ("q3", 3, "q")):
        redis_client.lpush(QUEUE, envelope(name, "a", prefix=prefix, expires=f"2100-01-{day:02}T00:00:00Z"))
    assert [name for _ in range(4) for name in names(take(leases))] == ["p2", "p9", "q1", "q3"]


def test_a_message_of_a_given_list_is_found_behind_messages_with_earlier_deadlines(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases(order=DEADLINE, ageing_seconds=1e-6)
    for number in range(20):
        push(redis_client, f"aged {number}", number, step=1)
    leases.sort(LISTS)
    leases.sort(LISTS)
    push(redis_client, "urgent")
    assert names(leases.fetch(LISTS, 1, taken_from=1)) == ["urgent"]


def test_a_blocked_key_of_deadlines_blocks_one_tenant_alone(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases(order=DEADLINE)
    push(redis_client, "a", 1, tenant="a")
    push(redis_client, "b", 2, tenant="b")
    leases.sort(LISTS)
    redis_client.delete(tenant_deadlines_key(QUEUE, "a"))
    redis_client.set(tenant_deadlines_key(QUEUE, "a"), "x")
    assert names(take(leases, 2)) == ["b"]
    redis_client.delete(tenant_deadlines_key(QUEUE, "a"))
    assert names(take(leases, 2)) == ["a"]
    assert not redis_client.exists(deadlines_key(QUEUE), tenant_ids_key(QUEUE, "a"))


def test_a_purge_leaves_a_key_of_deadlines_of_another_type_alone(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases(order=DEADLINE)
    for number in range(3):
        push(redis_client, str(number), number)
    leases.sort(LISTS)
    redis_client.delete(tenant_deadlines_key(QUEUE, "a"))
    redis_client.set(tenant_deadlines_key(QUEUE, "a"), "x")
    assert leases.purge(LISTS) == 3
    assert redis_client.get(tenant_deadlines_key(QUEUE, "a")) == b"x"
    assert not redis_client.exists(deadlines_key(QUEUE), tenant_ids_key(QUEUE, "a"))
