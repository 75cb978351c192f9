"""Fetches of better priorities alone, and messages that make room for them, against a real server."""

from collections.abc import Callable

import msgpack
import pytest
import redis

from headrace_broker.keys import lease_records_key, queue_lists, waiting_key
from headrace_broker.queue.leased_message import LeasedMessage
from headrace_broker.queue.leases import Leases
from service.broker.tenant_messages import LISTS, QUEUE, names, numbered, push, take

BETTER_THAN_9 = 3
"""Lists, in the order in which they are served."""


def take_better(leases: Leases, count: int = 1, lists: int = BETTER_THAN_9) -> list[LeasedMessage]:
    messages = leases.fetch(LISTS, count, taken_from=lists)
    for message in messages:
        leases.hold(message.lease_id, message)
    return messages


def test_messages_of_better_lists_are_taken_and_others_stay(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases()
    push(redis_client, "batch", numbered("b", 3), step=3)
    push(redis_client, "chat", ["c6"], step=2)
    push(redis_client, "chat", ["c0"], step=0)

    assert names(take_better(leases, 9, lists=1)) == ["c0"]
    assert names(take_better(leases, 9)) == ["c6"]
    assert take_better(leases, 9) == []
    assert redis_client.zscore(waiting_key(QUEUE), "batch") == 3
    assert names(take(leases, 9)) == ["b0", "b1", "b2"]


def test_a_fetched_message_has_the_priority_of_its_list_and_of_its_level(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases(ageing_seconds=0.000001)
    push(redis_client, "batch", ["b"], step=3)
    leases.sort(LISTS)
    (message,) = take(leases)
    assert message.list_name == queue_lists(QUEUE)[3]
    assert message.step == 0


def test_a_preempting_fetch_skips_messages_that_have_aged(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases(ageing_seconds=0.000001)
    push(redis_client, "batch", numbered("b", 3), step=3)
    leases.sort(LISTS)
    leases.sort(LISTS)
    push(redis_client, "chat", ["c"], step=0)
    push(redis_client, "batch", ["urgent"], step=0)

    assert sorted(names(take_better(leases, 9))) == ["c", "urgent"]
    assert names(take(leases, 9)) == ["b0", "b1", "b2"]


def test_the_search_for_better_messages_is_bounded(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases(ageing_seconds=0.000001)
    push(redis_client, "batch", numbered("b", 300), step=3)
    for _ in range(9):
        leases.sort(LISTS)
    push(redis_client, "batch", ["behind"], step=0)

    assert take_better(leases, 9) == []
    assert len(take(leases, 400)) == 301


def test_the_aged_messages_of_one_tenant_hide_no_better_one_of_another(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases(ageing_seconds=0.000001)
    push(redis_client, "batch", numbered("b", 450), step=3)
    for _ in range(15):
        leases.sort(LISTS)
    push(redis_client, "chat", ["c"], step=0)

    assert names(take_better(leases, 9)) == ["c"]


def test_preemptions_of_a_message_are_counted_and_are_no_deliveries(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    first, second = make_leases(), make_leases()
    push(redis_client, "batch", numbered("b", 2), step=3)
    for count in range(3):
        leases = (first, second)[count % 2]
        (message,) = take(leases)
        assert names([message]) == ["b0"]  # it keeps its place
        assert (message.preemptions, message.deliveries) == (count, 1)
        leases.requeue(message.lease_id, is_preempted=True)
    (message,) = take(first)
    first.requeue(message.lease_id)  # as a drain does, which is no preemption
    (message,) = take(first)
    assert message.preemptions == 3
    first.ack(message.lease_id)
    assert redis_client.hlen(lease_records_key(QUEUE)) == 1


def shift(client: "redis.Redis", message: LeasedMessage, *names: str, seconds: float) -> None:
    """Move times in a message's record into the past."""
    record = msgpack.unpackb(client.hget(lease_records_key(QUEUE), message.lease_id))
    record |= {name: record[name] - int(seconds * 1e6) for name in names}
    client.hset(lease_records_key(QUEUE), message.lease_id, msgpack.packb(record))


@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_message_does_not_age_while_it_runs(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis", is_preempted: bool
) -> None:
    leases = make_leases(ageing_seconds=600)
    push(redis_client, "batch", ["b"], step=3)
    for _ in range(2):  # together longer than the ageing time
        (message,) = take(leases)
        assert message.step == 9
        shift(redis_client, message, "since", "taken", seconds=500)
        leases.requeue(message.lease_id, is_preempted=is_preempted)
    leases.sort(LISTS)
    assert take(leases)[0].step == 9


def test_a_message_that_was_handed_back_continues_to_age(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases(ageing_seconds=600)
    push(redis_client, "batch", ["b"], step=3)
    (message,) = take(leases)
    shift(redis_client, message, "since", seconds=700)
    leases.requeue(message.lease_id)
    leases.sort(LISTS)
    assert take(leases)[0].step == 6


def test_a_preempted_message_ages_anew_from_its_own_priority_and_keeps_its_place(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases, ageing = make_leases(ageing_seconds=3600), make_leases(ageing_seconds=0.000001)
    push(redis_client, "batch", ["b0"], step=3)
    ageing.sort(LISTS)
    (message,) = take(ageing)
    assert message.step == 0
    push(redis_client, "batch", ["b1"], step=3)
    push(redis_client, "chat", ["c6"], step=2)
    leases.sort(LISTS)

    ageing.requeue(message.lease_id, is_preempted=True)

    assert names(take(leases, 1)) == ["c6"]
    found = take(leases, 9)
    assert names(found) == ["b0", "b1"]
    assert [message.step for message in found] == [9, 9]


def test_a_preempted_message_is_charged_once(make_leases: Callable[..., Leases], redis_client: "redis.Redis") -> None:
    leases = make_leases()
    push(redis_client, "batch", ["b"], step=3)
    for _ in range(3):
        (message,) = take(leases)
        leases.requeue(message.lease_id, is_preempted=True)
    (message,) = take(leases)
    leases.cost(message.lease_id, 70)
    leases.ack(message.lease_id)
    assert redis_client.zscore(f"headrace:share:served:{LISTS[3]}", "batch") == 70


def test_releasing_a_lost_lease_counts_no_preemption(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases, other = make_leases(), make_leases()
    push(redis_client, "batch", ["b"], step=3)
    (message,) = take(leases)
    other.requeue(message.lease_id, is_preempted=True)
    leases.requeue(message.lease_id)
    assert take(leases)[0].preemptions == 0
