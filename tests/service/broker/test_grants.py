"""The grant number: each lease of a message has its own, and a claim of an earlier lease fences no later one."""

from collections.abc import Callable

import msgpack
import pytest
import redis

from headrace_broker.keys import lease_deliveries_key, lease_records_key, leases_key, stream_key
from headrace_broker.queue.leased_message import LeasedMessage
from headrace_broker.queue.leases import Leases
from headrace_broker.results import ErrorInfo
from headrace_broker.streams.events import ChunkEvent, StartEvent
from headrace_broker.streams.grant import Grant
from headrace_broker.streams.writer import StreamWrite, StreamWriter, WriteOutcome
from service.broker.tenant_messages import LISTS, QUEUE, push, take

MakeLeases = Callable[..., Leases]


@pytest.fixture
def writer(redis_client: "redis.Redis") -> StreamWriter:
    return StreamWriter(redis_client, 60)


def grant_of(message: LeasedMessage) -> Grant:
    assert message.grant is not None
    return message.grant


def take_number(leases: Leases) -> tuple[LeasedMessage, int]:
    (message,) = take(leases)
    return message, grant_of(message).number


def expire(client: "redis.Redis", message: LeasedMessage) -> None:
    """Let the lease expire now, as if its holder had stopped renewing it, and return the message to its queue."""
    client.zadd(leases_key(QUEUE), {message.lease_id: 1}, xx=True)
    assert Leases(client, lease_seconds=60, delivery_limit=5).reap(QUEUE) == 1


def change_record(client: "redis.Redis", message: LeasedMessage, **values: object) -> None:
    record = msgpack.unpackb(client.hget(lease_records_key(QUEUE), message.lease_id)) | values
    kept = {name: value for name, value in record.items() if value is not None}
    client.hset(lease_records_key(QUEUE), message.lease_id, msgpack.packb(kept))


def entry_ids(client: "redis.Redis") -> list[str]:
    return [entry_id.decode() for entry_id, _ in client.xrange(stream_key("r"))]


def chunk(attempt: int, offset: int) -> StreamWrite:
    return StreamWrite.chunk("r", attempt, offset, index=0, token_ids=[offset], text="x")


def test_every_lease_of_a_message_has_a_higher_number_whatever_ended_the_one_before(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    push(redis_client, None, ["r"])
    leases = make_leases()
    message, number = take_number(leases)
    assert number == 1
    leases.requeue(message.lease_id)
    assert take_number(leases) == (message, 2)
    leases.requeue(message.lease_id, is_preempted=True)
    _, number = take_number(leases)
    assert number == 3
    leases.postpone(message.lease_id, 3000)
    expire(redis_client, message)
    _, number = take_number(make_leases())
    assert number == 4
    assert redis_client.hget(lease_deliveries_key(QUEUE), message.lease_id) == b"1"
    expire(redis_client, message)
    _, number = take_number(leases)
    assert number == 5
    leases.postpone(message.lease_id, 3000)
    (delayed,) = leases.take_delayed(LISTS, 10)
    assert grant_of(delayed).number == 6


def test_two_leases_of_a_message_have_different_owners_and_their_grants_do_not_show_them(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    push(redis_client, None, ["r"])
    first, second = make_leases(), make_leases()
    (message,) = take(first)
    expire(redis_client, message)
    (again,) = take(second)
    assert grant_of(message).owner != grant_of(again).owner
    assert len(grant_of(again).owner) == 32
    assert second.owner != grant_of(again).owner


def test_a_message_over_its_quota_is_leased_with_a_number(make_leases: MakeLeases, redis_client: "redis.Redis") -> None:
    push(redis_client, "a", ["first", "second"])
    leases = make_leases(quota=1)
    _, refused = sorted(take(leases, 1), key=lambda message: message.over_quota)
    assert refused.over_quota == 1
    assert grant_of(refused).number == 1


def test_a_record_of_an_earlier_version_gets_its_first_number_at_the_next_lease(
    make_leases: MakeLeases, redis_client: "redis.Redis"
) -> None:
    push(redis_client, None, ["r"])
    leases = make_leases()
    message, _ = take_number(leases)
    leases.requeue(message.lease_id)
    change_record(redis_client, message, grant=None)
    _, number = take_number(leases)
    assert number == 1


def test_a_lease_without_a_record_has_no_grant(make_leases: MakeLeases, redis_client: "redis.Redis") -> None:
    push(redis_client, None, ["r"])
    leases = make_leases()
    message, _ = take_number(leases)
    leases.postpone(message.lease_id, 3000)
    redis_client.delete(lease_records_key(QUEUE))
    (delayed,) = leases.take_delayed(LISTS, 10)
    assert delayed.grant is None


def test_the_attempt_has_the_number_of_the_lease(writer: StreamWriter, redis_client: "redis.Redis") -> None:
    claim = writer.claim("r", "w", grant=Grant(3, "a"))
    assert (claim.attempt, claim.is_stale, claim.continues) == (3, False, False)
    assert writer.publish([chunk(3, 1)]) == {}
    claim = writer.claim("r", "w", grant=Grant(7, "b"))
    assert (claim.attempt, claim.continues) == (7, True)
    assert [type(entry) for entry in claim.entries] == [StartEvent, ChunkEvent]
    assert writer.publish([chunk(3, 2)]) == {("r", 3): WriteOutcome.FENCED}
    assert entry_ids(redis_client) == ["3-0", "3-1", "7-0"]


@pytest.mark.parametrize("late", [Grant(1, "a"), Grant(2, "a")])
def test_a_claim_that_arrives_late_does_not_fence_the_rightful_owner(
    writer: StreamWriter, redis_client: "redis.Redis", late: Grant
) -> None:
    writer.claim("r", "w", grant=Grant(2, "b"))
    redis_client.expire(stream_key("r"), 5)
    claim = writer.claim("r", "w", grant=late)
    assert (claim.is_stale, claim.attempt, claim.entries, claim.ended) == (True, 2, [], None)
    assert entry_ids(redis_client) == ["2-0"]
    assert redis_client.ttl(stream_key("r")) <= 5
    assert writer.publish([chunk(2, 1)]) == {}


def test_a_claim_repeated_after_a_lost_reply_begins_no_other_attempt(
    writer: StreamWriter, redis_client: "redis.Redis"
) -> None:
    writer.claim("r", "w", grant=Grant(1, "a"))
    writer.publish([chunk(1, 1)])
    first = writer.claim("r", "w", content="c", grant=Grant(2, "b"))
    again = writer.claim("r", "w", content="c", grant=Grant(2, "b"))
    assert (first.attempt, again.attempt) == (2, 2)
    assert [entry.entry_id for entry in again.entries] == ["1-0", "1-1", "2-0"]
    assert again.continues
    assert entry_ids(redis_client) == ["1-0", "1-1", "2-0"]


def test_a_claim_repeated_before_the_first_token_continues_nothing(writer: StreamWriter) -> None:
    writer.claim("r", "w", grant=Grant(1, "a"))
    assert not writer.claim("r", "w", grant=Grant(1, "a")).continues


def test_an_attempt_whose_start_is_gone_belongs_to_another(writer: StreamWriter, redis_client: "redis.Redis") -> None:
    writer.claim("r", "w", grant=Grant(1, "a"))
    writer.publish([chunk(1, 1)])
    redis_client.xdel(stream_key("r"), "1-0")
    assert writer.claim("r", "w", grant=Grant(1, "a")).is_stale


def test_the_end_and_the_content_of_a_stream_count_before_the_grant(
    writer: StreamWriter, redis_client: "redis.Redis"
) -> None:
    writer.claim("r", "w", content="c", grant=Grant(4, "a"))
    assert writer.claim("r", "w", content="other", grant=Grant(1, "b")).is_of_another_message
    writer.end_unclaimed("r", "cancelled", ErrorInfo("cancelled", "x"), "c")
    assert entry_ids(redis_client)[-1] == "5-1"
    for number in (1, 4, 5, 6):
        claim = writer.claim("r", "w", content="c", grant=Grant(number, "b"))
        assert claim.ended is not None
        assert not claim.is_stale


def test_the_holder_of_a_lease_gets_a_number_above_the_stream_s_last_attempt(
    make_leases: MakeLeases, writer: StreamWriter, redis_client: "redis.Redis"
) -> None:
    push(redis_client, None, ["r"])
    leases = make_leases()
    (message,) = take(leases)
    writer.claim("r", "w", grant=Grant(7, "a"))
    claim = writer.claim("r", "w", grant=message.grant)
    assert (claim.is_stale, claim.attempt) == (True, 7)
    higher = leases.regrant(message.lease_id, claim.attempt)
    assert higher == Grant(8, grant_of(message).owner)
    assert writer.claim("r", "w", grant=higher).attempt == 8
    assert leases.regrant(message.lease_id, 1) == Grant(9, grant_of(message).owner)
    leases.requeue(message.lease_id)
    _, number = take_number(leases)
    assert number == 10


def test_a_lost_lease_gets_no_number(make_leases: MakeLeases, redis_client: "redis.Redis") -> None:
    push(redis_client, None, ["r"])
    first, second = make_leases(), make_leases()
    message, _ = take_number(first)
    expire(redis_client, message)
    assert first.regrant(message.lease_id, 1) is None
    assert second.regrant(message.lease_id, 1) is None
    _, number = take_number(second)
    assert number == 2
    assert first.regrant(message.lease_id, 2) is None
    second.ack(message.lease_id)
    assert second.regrant(message.lease_id, 2) is None


def test_a_lease_whose_record_is_gone_still_gets_a_number(make_leases: MakeLeases, redis_client: "redis.Redis") -> None:
    push(redis_client, None, ["r"])
    leases = make_leases()
    message, _ = take_number(leases)
    redis_client.delete(lease_records_key(QUEUE))
    assert leases.regrant(message.lease_id, 4) == Grant(5, grant_of(message).owner)


def test_workers_of_both_versions_take_turns(
    make_leases: MakeLeases, writer: StreamWriter, redis_client: "redis.Redis"
) -> None:
    """A worker of an earlier version neither counts its lease nor gives a grant."""
    push(redis_client, None, ["r"])
    leases = make_leases()
    (message,) = take(leases)
    assert writer.claim("r", "w", grant=message.grant).attempt == 1
    expire(redis_client, message)
    older = make_leases()
    take(older)
    change_record(redis_client, message, grant=1)
    assert writer.claim("r", "an older one").attempt == 2
    writer.publish([chunk(2, 1)])
    expire(redis_client, message)
    (message,) = take(leases)
    claim = writer.claim("r", "w", grant=message.grant)
    assert claim.is_stale
    claim = writer.claim("r", "w", grant=leases.regrant(message.lease_id, claim.attempt))
    assert (claim.attempt, claim.continues) == (3, True)
    assert writer.publish([chunk(2, 2), chunk(3, 2)]) == {("r", 2): WriteOutcome.FENCED}
    assert entry_ids(redis_client) == ["1-0", "2-0", "2-1", "3-0", "3-2"]
