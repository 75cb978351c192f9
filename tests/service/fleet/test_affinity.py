"""The next request of a conversation waits a moment for the worker that has its prompt in the prefix cache."""

import threading
from collections.abc import Callable
from itertools import product

import pytest
import redis

from headrace_broker.keys import (
    CREDIT_MILLISECONDS,
    HOLDERS_KEPT,
    credit_key,
    holder_wake_up_key,
    holders_key,
    leases_key,
    tenants_key,
    wake_up_key,
)
from headrace_broker.queue.leases import Leases
from service.broker.tenant_messages import LISTS, QUEUE, envelope, names, take
from service.broker.test_wrong_keys import PUT
from service.fleet.conversations import FOR_EVER, SYSTEM, VirtualFleet, end_grace, make_leases, run_sessions, send, turn

NUM_WORKERS, SLOTS, TURNS = 4, 16, 6


@pytest.fixture
def holder(redis_client: "redis.Redis") -> Leases:
    """A worker that has taken the first turns of conversations, and has free slots."""
    holder = make_leases(redis_client)
    send(redis_client, *(turn(session, 0) for session in "pqr"))
    assert len(take(holder, 9)) == 3
    return holder


@pytest.fixture
def other(redis_client: "redis.Redis") -> Leases:
    return make_leases(redis_client)


def tokens(client: "redis.Redis", worker: Leases) -> int:
    return int(client.llen(holder_wake_up_key(QUEUE, worker.owner)))  # type: ignore[arg-type]


def run_fleet(client: "redis.Redis", grace: float) -> VirtualFleet:
    client.flushall()
    fleet = VirtualFleet(client, NUM_WORKERS, SLOTS, grace)
    run_sessions(fleet, load=0.7, slots=NUM_WORKERS * SLOTS, sessions=120, turns=TURNS)
    assert fleet.follow_ups == 120 * (TURNS - 1)
    assert client.zcard(leases_key(QUEUE)) == 0
    return fleet


def test_a_grace_finds_nine_of_ten_conversations_cached_and_delays_no_other_tenant(redis_client: "redis.Redis") -> None:
    """One worker would have every follow-up in its cache. Times are virtual, so no slow machine changes them."""
    without, graced = (run_fleet(redis_client, grace) for grace in (0.0, 3600.0))
    assert graced.hits >= 0.9 * graced.follow_ups
    assert without.hits <= 0.7 * without.follow_ups
    assert sorted(graced.waits["b"]) == sorted(without.waits["b"])


def test_the_next_turn_waits_for_the_worker_that_took_the_last_one_and_wakes_it(
    holder: Leases, other: Leases, redis_client: "redis.Redis"
) -> None:
    send(redis_client, turn("p", 1))
    assert take(other, 4) == []
    assert tokens(redis_client, holder) == 1
    assert not redis_client.exists(wake_up_key(QUEUE))
    assert names(take(holder, 4)) == ["p.1"]


def test_the_worker_that_took_the_newest_turn_is_the_holder(
    holder: Leases, other: Leases, redis_client: "redis.Redis"
) -> None:
    send(redis_client, turn("p", 1))
    other.fetch(LISTS, 4)
    end_grace(redis_client)
    assert names(take(other, 4)) == ["p.1"]
    send(redis_client, turn("p", 2))
    assert take(holder, 4) == []
    assert names(take(other, 4)) == ["p.2"]


def test_conversations_with_one_system_prompt_are_not_alike(holder: Leases, redis_client: "redis.Redis") -> None:
    holder.remember_prefix(SYSTEM)
    send(redis_client, turn("x", 0), turn("y", 0), turn("q", 1))
    assert names(take(holder)) == ["q.1"]


def test_a_first_turn_and_messages_of_older_clients_wait_for_no_worker(
    holder: Leases, other: Leases, redis_client: "redis.Redis"
) -> None:
    send(redis_client, turn("p", 0, id="the same once more"), envelope("old", "a", prefix=SYSTEM))
    assert names(take(other, 4)) == ["p.0", "old"]


def test_after_the_grace_anyone_takes_the_message(holder: Leases, other: Leases, redis_client: "redis.Redis") -> None:
    graces: list[float] = []
    other.on_offered = graces.append
    send(redis_client, turn("p", 1))
    assert take(other, 4) == take(other, 4) == []
    assert len(graces) == 1  # only the first fetch that left it comes back
    assert 0 < graces[0] <= 3600.0
    end_grace(redis_client)
    assert names(take(other, 4)) == ["p.1"]


@pytest.mark.parametrize("older", ["p.1", "q.1"])
def test_the_worker_that_leaves_messages_of_two_ages_comes_back_when_the_grace_of_both_is_over(
    older: str, holder: Leases, other: Leases, redis_client: "redis.Redis"
) -> None:
    graces: list[float] = []
    other.on_offered = graces.append
    send(redis_client, turn("p", 1), turn("q", 1))
    other.sort(LISTS)
    end_grace(redis_client, graces=0.5, conversation=older)
    assert take(other, 4) == []
    assert len(graces) == 1
    assert 0.75 * FOR_EVER < graces[0] <= FOR_EVER


def test_another_tenants_conversation_of_the_same_name_has_a_holder_of_its_own(
    holder: Leases, other: Leases, redis_client: "redis.Redis"
) -> None:
    send(redis_client, turn("p", 1, "b"))
    assert names(take(other, 4)) == ["p.1"]
    send(redis_client, turn("p", 1))  # a's holder is the same as before
    assert take(other, 4) == []
    assert names(take(holder, 4)) == ["p.1"]


def test_a_clock_that_is_set_back_makes_no_message_wait(
    holder: Leases, other: Leases, redis_client: "redis.Redis"
) -> None:
    send(redis_client, turn("p", 1))
    other.sort(LISTS)
    end_grace(redis_client, graces=-0.001)
    assert names(take(other, 4)) == ["p.1"]


def test_a_message_that_becomes_due_again_wakes_its_holder_again(
    holder: Leases, other: Leases, redis_client: "redis.Redis"
) -> None:
    graces: list[float] = []
    other.on_offered = graces.append
    send(redis_client, turn("p", 1))
    take(other, 4)
    (message,) = take(holder, 1)
    holder.postpone(message.lease_id, 0)
    holder.slots.tell(QUEUE, 4)
    redis_client.delete(holder_wake_up_key(QUEUE, holder.owner))
    redis_client.zadd(leases_key(QUEUE), {message.lease_id: 1})
    other.reap(QUEUE)
    assert take(other, 4) == []
    assert tokens(redis_client, holder) == 1
    assert len(graces) == 2


@pytest.mark.parametrize(
    "happens",
    [
        lambda client, holder: client.delete(credit_key(QUEUE, holder.owner)),
        lambda client, holder: client.set(credit_key(QUEUE, holder.owner), "0"),
        lambda client, holder: client.set(credit_key(QUEUE, holder.owner), "many"),
        lambda client, holder: holder.slots.withdraw(QUEUE),
        lambda client, holder: client.hset(holders_key(QUEUE), "p.0 a", "nonsense"),
        lambda client, holder: client.delete(holders_key(QUEUE)),
    ],
    ids=["it was not heard of", "it is full", "it told no number", "it cannot fetch", "no worker", "forgotten"],
)
def test_a_message_does_not_wait_for_a_holder_without_a_free_slot_or_that_is_unknown(
    happens: Callable[["redis.Redis", Leases], object], holder: Leases, other: Leases, redis_client: "redis.Redis"
) -> None:
    happens(redis_client, holder)
    send(redis_client, turn("p", 1))
    assert names(take(other, 4)) == ["p.1"]


def test_no_message_waits_for_a_worker_whose_fetch_has_filled_all_slots(
    holder: Leases, other: Leases, redis_client: "redis.Redis"
) -> None:
    holder.slots.tell(QUEUE, 6)
    assert 0 < redis_client.pttl(credit_key(QUEUE, holder.owner)) <= CREDIT_MILLISECONDS
    send(redis_client, turn("x", 0))
    take(holder, 1)
    assert not redis_client.exists(credit_key(QUEUE, holder.owner))
    send(redis_client, turn("p", 1), turn("q", 1))
    assert names(take(other, 1)) == ["p.1"]
    holder.slots.tell(QUEUE, 2)  # at once, as a request has ended
    assert take(other, 1) == []


def test_no_holder_is_offered_more_messages_than_it_has_free_slots(
    holder: Leases, other: Leases, redis_client: "redis.Redis"
) -> None:
    redis_client.set(credit_key(QUEUE, holder.owner), "3")
    send(redis_client, turn("p", 1, choices=2), turn("q", 1, choices=2), turn("r", 1))
    assert names(take(other, 4)) == ["q.1"]
    assert names(take(holder, 4)) == ["p.1", "r.1"]


def test_a_tenant_whose_message_waits_keeps_its_place_and_another_tenant_does_not_wait(
    holder: Leases, other: Leases, redis_client: "redis.Redis"
) -> None:
    send(redis_client, turn("p", 1, "a"), turn("x", 0, "b"), turn("y", 0, "b"))
    make_leases(redis_client, grace=0.0).sort(LISTS)
    redis_client.zadd(tenants_key(LISTS[0]), {"a": 0.0, "b": 1.0})
    assert names(take(other, 1)) == ["x.0"]
    assert redis_client.zscore(tenants_key(LISTS[0]), "a") == 0.0
    assert names(take(holder, 4)) == ["p.1", "y.0"]


def test_the_due_tenant_does_not_change_for_a_conversation(holder: Leases, redis_client: "redis.Redis") -> None:
    send(redis_client, turn("x", 0, "new"), turn("p", 1, "a"))
    make_leases(redis_client, grace=0.0).sort(LISTS)
    redis_client.zadd(tenants_key(LISTS[0]), {"new": 0.0, "a": 1.0})
    assert names(take(holder)) == ["x.0"]


def test_a_message_that_is_left_to_its_holder_leaves_the_token_for_messages_that_others_can_take(
    holder: Leases, other: Leases, redis_client: "redis.Redis"
) -> None:
    send(redis_client, turn("p", 1), turn("x", 0), turn("y", 0))
    assert names(take(other, 1)) == ["x.0"]
    assert redis_client.exists(wake_up_key(QUEUE))
    assert names(take(make_leases(redis_client), 4)) == ["y.0"]
    assert not redis_client.exists(wake_up_key(QUEUE))


WRONG_KEYS: list[Callable[[str], str]] = [
    lambda _owner: holders_key(QUEUE),
    lambda owner: credit_key(QUEUE, owner),
    lambda owner: holder_wake_up_key(QUEUE, owner),
]


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("kind", PUT)
def test_a_key_of_the_wrong_type_makes_no_message_wait(
    kind: str, place: int, holder: Leases, other: Leases, redis_client: "redis.Redis"
) -> None:
    key = WRONG_KEYS[place](holder.owner)
    redis_client.delete(key)
    PUT[kind](redis_client, key)
    send(redis_client, turn("p", 1), turn("x", 0))
    is_token = place == 2 and kind == "list"
    assert names(take(other, 4)) == ["p.1", "x.0"][is_token:]
    assert names(take(holder, 4)) == ["p.1", "x.0"][:is_token]


def test_workers_that_race_take_each_message_once(redis_client: "redis.Redis") -> None:
    workers = [make_leases(redis_client, grace) for grace in (3600.0, 3600.0, 0.0)]
    sessions = [f"s{number}" for number in range(30)]
    taken: list[str] = []

    def fetch(worker: Leases, count: int) -> None:
        taken.extend(name for _ in range(count) for name in names(take(worker, 2)))

    for number in range(3):
        send(redis_client, *(turn(session, number) for session in sessions))
        threads = [threading.Thread(target=fetch, args=(worker, 20)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        end_grace(redis_client)
        fetch(workers[0], 20)
    assert sorted(taken) == sorted(f"{session}.{number}" for session, number in product(sessions, range(3)))


def test_a_worker_without_a_grace_takes_a_message_that_waits(holder: Leases, redis_client: "redis.Redis") -> None:
    """So does one of an earlier version: it does not know of holders."""
    earlier = make_leases(redis_client, grace=0.0)
    send(redis_client, turn("p", 1), turn("q", 1))
    take(make_leases(redis_client), 4)
    assert names(take(earlier, 1)) == ["p.1"]
    assert names(take(holder, 4)) == ["q.1"]


def test_a_message_that_preempts_waits_for_no_holder_and_gives_its_conversation_another(
    holder: Leases, other: Leases, redis_client: "redis.Redis"
) -> None:
    send(redis_client, turn("p", 1))
    assert names(other.fetch(LISTS, 1, taken_from=1)) == ["p.1"]
    other.slots.tell(QUEUE, 1)
    send(redis_client, turn("p", 2))
    assert take(holder, 4) == []


def test_a_worker_remembers_the_newest_conversations(holder: Leases, redis_client: "redis.Redis") -> None:
    redis_client.delete(holders_key(QUEUE))
    old = {f"old{number}": f"someone {number}" for number in range(HOLDERS_KEPT)}
    redis_client.hset(holders_key(QUEUE), mapping=old)  # type: ignore[arg-type]
    send(redis_client, *(turn(f"new{number}", 0) for number in range(20)))
    take(holder, 20)
    assert redis_client.hlen(holders_key(QUEUE)) == HOLDERS_KEPT
    assert all(redis_client.hexists(holders_key(QUEUE), f"new{number}.0 a") for number in range(20))


def scene(client: "redis.Redis", policy: dict[str, object], **headers: object) -> tuple[list[str], object, set[bytes]]:
    """Return what two workers take in turns, how often each command ran, and which keys there were."""
    client.flushall()
    workers = [make_leases(client, 0.0, policy=policy) for _ in range(2)]
    client.config_resetstat()
    taken, keys = [], set()
    for number in range(3):
        for session in "pq":
            client.lpush(LISTS[0], envelope(f"{session}{number}", "a", prefix=session, **headers))
        for worker in workers:
            worker.slots.tell(QUEUE, 4)
            for message in worker.fetch(LISTS, 1):
                worker.remember_prefix(message.body[:1].decode())
                taken += names([message])
        calls = {name: figures["calls"] for name, figures in client.info("commandstats").items()}
        keys |= set(client.keys())
    return taken, {name: count for name, count in calls.items() if name not in IGNORED}, keys


IGNORED = ("cmdstat_script|load", "cmdstat_evalsha", "cmdstat_keys", "cmdstat_info", "cmdstat_config|resetstat")


@pytest.mark.parametrize("policy", [{"prefix_affinity": False}, {"prefix_affinity": True}])
def test_without_a_grace_conversations_change_no_order_no_command_and_no_key(
    policy: dict[str, object], redis_client: "redis.Redis"
) -> None:
    plain = scene(redis_client, policy)
    named = scene(redis_client, policy, continues="c", conversation="c")
    assert named == plain
    own = [build(QUEUE, "").encode() for build in (credit_key, holder_wake_up_key)]
    assert not [key for key in named[2] if key.startswith((*own, holders_key(QUEUE).encode()))]
