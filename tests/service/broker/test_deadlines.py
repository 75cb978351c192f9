"""The earliest deadline of a queue's waiting messages, on a real server."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis

from headrace_broker.client.client import Client
from headrace_broker.keys import deadlines_key, lease_records_key
from headrace_broker.queue.deadlines import read_earliest_slack
from headrace_broker.queue.leases import Leases
from headrace_broker.queue.purge import purge_queue
from headrace_broker.server.embedded import EmbeddedServer
from service.broker.tenant_messages import LISTS, QUEUE, envelope, names, take

KEY = deadlines_key(QUEUE)


def now(client: "redis.Redis") -> float:
    seconds, microseconds = client.time()
    return seconds + microseconds / 1e6


def push(client: "redis.Redis", name: str, expires: Any = None, *, step: int = 0, tenant: str = "a") -> None:
    """Send a message. `expires`: seconds from now, or the header itself; None: no header."""
    if isinstance(expires, int):
        expires = datetime.fromtimestamp(now(client) + expires, UTC).isoformat()
    client.lpush(LISTS[step], envelope(name, tenant, **({} if expires is None else {"expires": expires})))


def slack(client: "redis.Redis") -> float | None:
    """Return the earliest slack, rounded up to tens of seconds."""
    found = read_earliest_slack(client, QUEUE)
    return None if found is None else -(-found // 10) * 10


def test_a_queue_without_deadlines_has_no_slack(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    assert slack(redis_client) is None
    push(redis_client, "a")
    assert slack(redis_client) is None
    make_leases().sort(LISTS)
    assert slack(redis_client) is None
    assert not redis_client.exists(KEY)


def test_the_earliest_deadline_counts_in_all_steps_and_of_all_tenants(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    push(redis_client, "late", 3000)
    push(redis_client, "none")
    push(redis_client, "soon", 600, step=3, tenant="b")
    make_leases().sort(LISTS)
    assert slack(redis_client) == 600
    push(redis_client, "past", -50, step=2)
    make_leases().sort(LISTS)
    assert slack(redis_client) == -50


def test_the_oldest_unsorted_message_of_each_list_counts_while_no_worker_runs(redis_client: "redis.Redis") -> None:
    push(redis_client, "first", 3000)
    push(redis_client, "second", 60)
    assert slack(redis_client) == 3000
    push(redis_client, "other step", 1200, step=1)
    assert slack(redis_client) == 1200


def test_leased_and_delayed_messages_do_not_count_until_they_wait_again(redis_client: "redis.Redis") -> None:
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=5)
    push(redis_client, "a", 600)
    (message,) = take(leases)
    assert slack(redis_client) is None
    leases.requeue(message.lease_id)
    assert slack(redis_client) == 600
    (message,) = take(leases)
    leases.postpone(message.lease_id, 0)
    assert slack(redis_client) is None
    leases.reap(QUEUE)
    assert slack(redis_client) == 600
    (message,) = take(leases)
    leases.requeue(message.lease_id, is_preempted=True)
    assert slack(redis_client) == 600
    (message,) = take(leases)
    leases.ack(message.lease_id)
    assert slack(redis_client) is None
    assert not redis_client.exists(KEY)


def test_the_deadline_of_a_dead_workers_message_counts_again(redis_client: "redis.Redis") -> None:
    push(redis_client, "a", 600)
    (_message,) = Leases(redis_client, lease_seconds=0, delivery_limit=5).fetch(LISTS, 1)
    assert not redis_client.exists(KEY)
    Leases(redis_client, lease_seconds=60, delivery_limit=5).reap(QUEUE)
    assert slack(redis_client) == 600


def test_an_aged_message_keeps_its_deadline(make_leases: Callable[..., Leases], redis_client: "redis.Redis") -> None:
    push(redis_client, "a", 600, step=3)
    leases = make_leases(ageing_seconds=1e-6)
    leases.sort(LISTS)
    leases.sort(LISTS)
    assert redis_client.zcard(KEY) == 1
    assert slack(redis_client) == 600
    assert names(take(leases)) == ["a"]
    assert not redis_client.exists(KEY)


def test_a_purge_removes_the_deadlines(make_leases: Callable[..., Leases], redis_client: "redis.Redis") -> None:
    for number in range(3):
        push(redis_client, f"a{number}", 600)
    make_leases().sort(LISTS)
    assert make_leases().purge(LISTS) == 3
    assert not redis_client.exists(KEY)
    for number in range(3):
        push(redis_client, f"b{number}", 600)
    make_leases().sort(LISTS)
    assert purge_queue(redis_client, QUEUE, ttl_seconds=60).waiting == 3
    assert not redis_client.exists(KEY)


def test_a_message_over_its_tenants_quota_has_no_deadline_in_the_queue(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    for number in range(3):
        push(redis_client, f"a{number}", 600)
    make_leases(quota=1).fetch(LISTS, 0)
    assert redis_client.zcard(KEY) == 1


def test_a_request_of_our_client_that_expires_has_the_deadline_that_it_was_given(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", make_leases: Callable[..., Leases]
) -> None:
    with Client(redis_server.url, check_model=False, model="m") as client:
        client.submit("a", expires=600)
    make_leases().sort(LISTS)
    ((_, deadline),) = redis_client.zrange(KEY, 0, -1, withscores=True)
    assert 590 < deadline / 1e6 - now(redis_client) <= 600


@pytest.mark.parametrize(
    "moment",
    [
        datetime(1970, 1, 1, tzinfo=UTC),
        datetime(2000, 2, 29, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime(2026, 3, 1, 7, 5, 9, tzinfo=UTC),
        datetime(2100, 2, 28, 12, tzinfo=UTC),
        datetime(2100, 3, 1, 12, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, tzinfo=UTC),
    ],
)
def test_a_deadline_is_read_like_python_reads_it(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis", moment: datetime
) -> None:
    zone = timedelta(hours=5, minutes=30)
    texts = [moment.isoformat(), moment.replace(tzinfo=None).isoformat(), f"{moment.replace(tzinfo=None).isoformat()}Z"]
    for sign, offset in (("+", zone), ("-", -zone)):
        if moment.year < 9999:
            texts += [f"{(moment + offset).replace(tzinfo=None).isoformat()}{sign}{form}" for form in ("05:30", "0530")]
    for number, text in enumerate(texts):
        push(redis_client, f"a{number}", text)
    make_leases().sort(LISTS)
    expected = (moment - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(microseconds=1)
    found = {score for _, score in redis_client.zrange(KEY, 0, -1, withscores=True)}
    assert redis_client.zcard(KEY) == len(texts)
    assert found == {expected}


@pytest.mark.parametrize(
    "header",
    [60, True, [], {}, "", "soon", "2026-11-28", "2026-11-28T07:41:10+1", "2026-11-28T07:41:10 and", "2" * 100_000],
)
def test_a_message_whose_expires_cannot_be_read_waits_without_a_deadline(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis", header: object
) -> None:
    redis_client.lpush(QUEUE, envelope("a", "t", expires=header))
    assert slack(redis_client) is None
    make_leases().sort(LISTS)
    assert not redis_client.exists(KEY)
    assert names(take(make_leases())) == ["a"]


def test_the_reaper_removes_deadlines_of_messages_that_do_not_wait(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases()
    leases.serve(QUEUE)
    push(redis_client, "taken", 60)
    push(redis_client, "waits", 600)
    (taken,) = take(leases)
    redis_client.zadd(KEY, {taken.lease_id: 1.0, "unknown": 2.0})  # as workers of an earlier version leave them
    leases.reap()
    assert redis_client.zcard(KEY) == 1
    assert slack(redis_client) == 600
    redis_client.delete(lease_records_key(QUEUE))
    leases.reap()
    assert not redis_client.exists(KEY)


def test_deadlines_of_the_wrong_type_count_as_none(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases()
    leases.serve(QUEUE)
    redis_client.set(KEY, "x")
    assert slack(redis_client) is None
    leases.reap()
    redis_client.lpush(LISTS[1], "{")
    redis_client.set(LISTS[0], "x")
    assert slack(redis_client) is None
