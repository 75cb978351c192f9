"""The usage ledger: each request that ended is counted once, with its tokens."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from headrace_broker.keys import ENDED_SECONDS, leases_key, tenant_requests_key, usage_key
from headrace_broker.queue.leased_message import LeasedMessage
from headrace_broker.queue.leases import Leases
from headrace_broker.results import Usage
from headrace_broker.usage.entry import UsageEntry, key_name_of
from headrace_broker.usage.ledger import DAY, HOUR, UsageCounts, Usages, read_usage, rename_row
from headrace_wire.codes import DeadLetterReason
from service.broker.tenant_messages import LISTS, QUEUE, envelope, take, tenant_of

USAGE = Usage(10, 4, 3)
ENTRY = UsageEntry("completions", "web", USAGE)

MakeLeases = Callable[..., Leases]


@pytest.fixture
def make_leases(redis_client: "redis.Redis") -> MakeLeases:
    def make(usage_days: int = 400, result_seconds: int = 0) -> Leases:
        kept = {"usage_days": usage_days, "result_seconds": result_seconds}
        return Leases(redis_client, lease_seconds=60, delivery_limit=5, **kept)

    return make


def push(client: "redis.Redis", tenant: str, count: int, *, step: int = 0) -> None:
    for _ in range(count):
        client.lpush(LISTS[step], envelope(uuid.uuid4().hex, tenant))


def expire_leases(client: "redis.Redis") -> None:
    """Let every lease expire now, as if its holder had stopped renewing it."""
    for lease_id in client.zrange(leases_key(QUEUE), 0, -1):
        client.zadd(leases_key(QUEUE), {lease_id: 1})


def end(leases: Leases, message: LeasedMessage, entry: UsageEntry | None = ENTRY) -> None:
    leases.cost(message.lease_id, 13, entry)
    leases.ack(message.lease_id)


def usage(client: "redis.Redis", width: int = DAY) -> Usages:
    now = client.time()[0]
    return read_usage([client], width, now - 2 * DAY, now + DAY)


def total(client: "redis.Redis", width: int = DAY) -> UsageCounts:
    found = UsageCounts()
    for counts in usage(client, width).values():
        found = found.plus(counts)
    return found


@contextmanager
def acknowledged_by(leases: Leases, run: Callable[..., Any]) -> Iterator[None]:
    """Let another function run the script that acknowledges."""
    before = leases._run["ack"]
    leases._run["ack"] = run
    yield
    leases._run["ack"] = before


def test_an_ended_request_is_in_its_hour_and_in_the_sum_of_its_day(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    push(redis_client, "acme", 1)
    leases = make_leases()
    end(leases, *take(leases))
    for width in (HOUR, DAY):
        ((group, counts),) = usage(redis_client, width).items()
        assert (group.tenant, group.key_name, group.model, group.kind, group.step) == (
            *("acme", "web", "m", "completions", 0),
        )
        assert group.start % width == 0
        assert (counts.requests, counts.attempts) == (1, 1)
        assert (counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens) == (10, 4, 3)
        assert 0 <= counts.milliseconds < 60_000
    (bucket,) = redis_client.scan_iter("headrace:usage:*")
    assert redis_client.ttl(bucket) > 400 * DAY


def test_requests_of_one_tenant_key_and_model_share_a_row(make_leases: MakeLeases, redis_client: "redis.Redis") -> None:
    push(redis_client, "acme", 20)
    leases = make_leases()
    for message in take(leases, 20):
        end(leases, message)
    size = redis_client.dbsize()
    assert len(usage(redis_client)) == 1
    push(redis_client, "acme", 5)
    for message in take(leases, 5):
        end(leases, message)
    assert redis_client.dbsize() <= size + 2  # an hour may have begun meanwhile
    assert total(redis_client).requests == 25
    assert total(redis_client).prompt_tokens == 250


def test_tenants_keys_endpoints_and_priorities_have_rows_of_their_own(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    push(redis_client, "acme", 2)
    push(redis_client, "béta", 1)
    push(redis_client, "acme", 1, step=3)
    entries = {"acme": [ENTRY, ENTRY, UsageEntry("completions", "app", USAGE)]}
    entries["béta"] = [UsageEntry("embeddings", "", USAGE)]
    leases = make_leases()
    for message in take(leases, 4):
        end(leases, message, entries[tenant_of(message)].pop())
    assert {(group.tenant, group.key_name, group.kind, group.step) for group in usage(redis_client)} == {
        ("acme", "app", "completions", 0),
        ("acme", "web", "completions", 0),
        ("acme", "web", "completions", 9),
        ("béta", "", "embeddings", 0),
    }


def test_a_worker_that_has_lost_its_lease_counts_nothing(make_leases: MakeLeases, redis_client: "redis.Redis") -> None:
    push(redis_client, "acme", 1)
    slow, other = make_leases(), make_leases()
    (message,) = take(slow)
    expire_leases(redis_client)
    assert other.reap(QUEUE) == 1
    (again,) = take(other)
    end(slow, message)
    assert total(redis_client) == UsageCounts()
    end(other, again)
    end(slow, message)
    found = total(redis_client)
    assert (found.requests, found.completion_tokens, found.attempts) == (1, 3, 2)


def test_an_acknowledgement_whose_reply_is_lost_counts_once(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    push(redis_client, "acme", 1)
    leases = make_leases()
    (message,) = take(leases)
    run = leases._run["ack"]

    def lose_reply(*args: Any, **keys: Any) -> None:
        run(*args, **keys)
        raise redis.ConnectionError("the reply is lost")

    with acknowledged_by(leases, lose_reply):
        end(leases, message)
    leases.tick()
    assert total(redis_client).requests == 1


def test_an_acknowledgement_that_redis_did_not_get_is_counted_when_it_is_retried(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    push(redis_client, "acme", 1)
    leases = make_leases()
    (message,) = take(leases)

    def refuse(*_: Any, **__: Any) -> None:
        raise redis.ConnectionError("no connection")

    with acknowledged_by(leases, refuse):
        end(leases, message)
    assert total(redis_client) == UsageCounts()
    leases.tick()
    assert total(redis_client).completion_tokens == 3


def test_a_message_that_returns_to_the_queue_is_not_counted(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    push(redis_client, "acme", 1)
    leases = make_leases()
    for settle in (leases.requeue, leases.let_go, lambda lease_id: leases.postpone(lease_id, 0.0)):
        (message,) = take(leases) or take(leases)
        leases.cost(message.lease_id, 13, ENTRY)
        settle(message.lease_id)
        expire_leases(redis_client)
        leases.reap(QUEUE)
    assert total(redis_client) == UsageCounts()


def test_a_request_that_ended_as_a_dead_letter_is_counted(make_leases: MakeLeases, redis_client: "redis.Redis") -> None:
    push(redis_client, "acme", 2)
    leases = make_leases()
    ran, duplicate = take(leases, 2)
    leases.cost(ran.lease_id, 13, ENTRY)
    leases.dead_letter(ran.lease_id, DeadLetterReason.POISON)
    leases.dead_letter(duplicate.lease_id, DeadLetterReason.DUPLICATE_ID)
    assert total(redis_client).requests == 1


def test_a_bucket_of_the_wrong_type_does_not_prevent_the_acknowledgement(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    push(redis_client, "acme", 1)
    leases = make_leases()
    (message,) = take(leases)
    start = redis_client.time()[0] // HOUR * HOUR
    redis_client.set(usage_key(start), "by hand")
    redis_client.set(usage_key(start + HOUR), "by hand")
    end(leases, message)
    assert not redis_client.exists(leases_key(QUEUE))
    assert total(redis_client) == UsageCounts()


def test_a_row_that_was_edited_by_hand_begins_at_zero(make_leases: MakeLeases, redis_client: "redis.Redis") -> None:
    leases = make_leases()
    push(redis_client, "acme", 2)
    first, second = take(leases, 2)
    end(leases, first)
    for key in redis_client.scan_iter(usage_key(0)[:-1] + "*"):
        for row in redis_client.hkeys(key):
            redis_client.hset(key, row, b"\xc1 no msgpack")
    assert total(redis_client) == UsageCounts()
    end(leases, second)
    assert total(redis_client).requests == 1


def test_a_full_bucket_counts_further_tenants_together(make_leases: MakeLeases, redis_client: "redis.Redis") -> None:
    now = redis_client.time()[0]
    for start in (now // HOUR * HOUR, now // HOUR * HOUR + HOUR):
        redis_client.hset(usage_key(start), mapping={f"row {number}": "x" for number in range(1000)})
    leases = make_leases()
    for tenant in ("acme", "beta"):
        push(redis_client, tenant, 1)
    for message in take(leases, 2):
        end(leases, message)
    ((group, counts),) = usage(redis_client).items()
    assert (group.tenant, group.key_name, group.model) == ("(others)", "(others)", "m")
    assert counts.requests == 2


def test_nothing_is_counted_without_days(make_leases: MakeLeases, redis_client: "redis.Redis") -> None:
    push(redis_client, "acme", 1)
    leases = make_leases(usage_days=0)
    end(leases, *take(leases))
    assert not list(redis_client.scan_iter("headrace:usage:*"))


def test_the_sums_are_kept_as_long_as_is_set(make_leases: MakeLeases, redis_client: "redis.Redis") -> None:
    push(redis_client, "acme", 1)
    leases = make_leases(usage_days=1)
    end(leases, *take(leases))
    for key in redis_client.scan_iter("headrace:usage:*"):
        assert DAY < redis_client.ttl(key) <= DAY + HOUR


@pytest.mark.parametrize("header", [None, 7, "", "a\nb", "x" * 201, "\ud800", ["web"]])
def test_a_header_that_is_no_name_counts_as_no_key(header: object) -> None:
    assert key_name_of(header) == ""


def test_the_usage_of_several_servers_is_summed(make_leases: MakeLeases, redis_client: "redis.Redis") -> None:
    push(redis_client, "acme", 1)
    leases = make_leases()
    end(leases, *take(leases))
    now = redis_client.time()[0]
    (counts,) = read_usage([redis_client, redis_client], DAY, now - DAY, now + DAY).values()
    assert (counts.requests, counts.prompt_tokens) == (2, 20)


def test_the_requests_of_a_tenant_are_known_for_as_long_as_they_are_stored(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    leases = make_leases(result_seconds=600)
    redis_client.zadd(tenant_requests_key("acme"), {"old": 1})
    for request_id in ("new", "second of the hour"):
        redis_client.lpush(LISTS[0], envelope(request_id, "acme", id=request_id))
        end(leases, *take(leases))
    assert set(redis_client.zrange(tenant_requests_key("acme"), 0, -1)) == {b"new", b"second of the hour"}
    assert 600 < redis_client.ttl(tenant_requests_key("acme")) <= 600 + ENDED_SECONDS + HOUR
    assert not redis_client.exists(tenant_requests_key(""))


def test_a_row_moves_to_another_one(make_leases: MakeLeases, redis_client: "redis.Redis") -> None:
    leases = make_leases()
    push(redis_client, "acme", 2)
    push(redis_client, "beta", 1)
    for message in take(leases, 3):
        end(leases, message)
    (bucket,) = redis_client.keys("headrace:usage:*")
    for row in redis_client.hkeys(bucket):
        assert rename_row(redis_client, bucket.decode(), row, "(erased)")
        assert not rename_row(redis_client, bucket.decode(), row, "(erased)")
    ((group, counts),) = usage(redis_client).items()
    assert (group.tenant, group.key_name) == ("(erased)", "(erased)")
    assert (counts.requests, counts.prompt_tokens) == (3, 30)
