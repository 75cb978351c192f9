"""Which message a request id belongs to, from its arrival until the message is gone."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import redis

from headrace_broker.keys import lease_bodies_key, lease_requests_key, leases_key, queue_lists, stream_key
from headrace_broker.packing import unpack
from headrace_broker.queue.dead_letters import DeadLetter, dead_letters, requeue
from headrace_broker.queue.leased_message import LeasedMessage
from headrace_broker.queue.leases import Leases
from headrace_broker.queue.message_envelope import content_digest
from headrace_broker.results import ErrorInfo
from headrace_broker.streams.writer import Ending, StreamWrite, StreamWriter
from headrace_wire.codes import DeadLetterReason
from service.workers.messages import message

QUEUE = "headrace.m"
LISTS = queue_lists(QUEUE)
OTHER_LISTS = queue_lists("headrace.n")


@pytest.fixture
def leases(redis_client: "redis.Redis") -> Leases:
    return Leases(redis_client, lease_seconds=60, delivery_limit=2)


@pytest.fixture
def reported(leases: Leases) -> list[DeadLetter]:
    letters: list[DeadLetter] = []
    leases.on_dead_letter = letters.append
    return letters


def raw(request_id: Any, body: bytes = b"mine", **changes: Any) -> bytes:
    return json.dumps(message(body, request_id=request_id, **changes)).encode()


def take(leases: Leases, lists: list[str] = LISTS) -> list[LeasedMessage]:
    messages = leases.fetch(lists, 10)
    for leased in messages:
        leases.hold(leased.lease_id, leased)
    return messages


def bound(client: "redis.Redis") -> dict[bytes, bytes]:
    known: Any = client.hgetall(lease_requests_key(QUEUE))
    return dict(known)


@pytest.mark.parametrize("is_taken", [False, True], ids=["waiting", "taken"])
def test_a_second_message_with_other_content_becomes_a_dead_letter_without_the_id(
    leases: Leases, reported: list[DeadLetter], redis_client: "redis.Redis", is_taken: bool
) -> None:
    redis_client.lpush(LISTS[0], raw("r"))
    if is_taken:
        take(leases)
    redis_client.lpush(LISTS[0], raw("r", b"another"), raw("r", tenant="t"), raw("s"))
    taken = take(leases)
    assert {leased.bound_id for leased in taken} == ({"s"} if is_taken else {"r", "s"})
    assert [(letter.reason, letter.bound_id, letter.request_id) for letter in reported] == [
        (DeadLetterReason.DUPLICATE_ID, None, "r")
    ] * 2
    assert requeue(redis_client, dead_letters(redis_client, QUEUE)) == []


def test_messages_of_two_queues_are_leased_apart_even_if_all_their_bytes_are_the_same(
    leases: Leases, reported: list[DeadLetter], redis_client: "redis.Redis"
) -> None:
    for lists in (LISTS, OTHER_LISTS):
        redis_client.lpush(lists[0], raw("r"))
    (first,), (second,) = take(leases), take(leases, OTHER_LISTS)
    assert first.lease_id != second.lease_id
    leases.ack(first.lease_id)
    assert redis_client.hlen(lease_bodies_key(QUEUE)) == 0
    leases.tick()
    assert leases.held() == {second.lease_id: second}
    leases.dead_letter(second.lease_id, DeadLetterReason.REJECTED)
    assert dead_letters(redis_client, QUEUE) == []
    assert [letter.queue for letter in dead_letters(redis_client, "headrace.n")] == ["headrace.n"]
    assert [letter.bound_id for letter in reported] == ["r"]


def test_a_second_message_with_the_same_content_is_dropped_whatever_its_envelope(
    leases: Leases, reported: list[DeadLetter], redis_client: "redis.Redis"
) -> None:
    redis_client.lpush(LISTS[0], raw("r"), raw("r", enqueued_at=7.5), raw("r", expires="2001-01-01T00:00:00"))
    redis_client.lpush(LISTS[2], raw("r", eta="2001-01-01T00:00:00"))
    assert [leased.body for leased in take(leases)] == [raw("r")]
    assert (reported, dead_letters(redis_client, QUEUE)) == ([], [])


def as_text(request_id: str, prompt: str, body_encoding: str | None) -> bytes:
    """Return a message with a body of JSON text, full of quotes that are escaped in the message."""
    written = message(b"", request_id=request_id)
    written["body"] = json.dumps([[], {"prompt": prompt}, {}])
    written["properties"]["body_encoding"] = body_encoding
    return json.dumps(written).encode()


@pytest.mark.parametrize("body_encoding", [None, "utf-8"])
def test_a_body_that_is_a_json_string_in_its_message_is_compared_whole(
    leases: Leases, reported: list[DeadLetter], redis_client: "redis.Redis", body_encoding: str | None
) -> None:
    first = as_text("r", 'say "yes" \\', body_encoding)
    redis_client.lpush(LISTS[0], first, first + b" ", as_text("r", 'say "no" \\', body_encoding))
    assert [leased.body for leased in take(leases)] == [first]
    assert [letter.reason for letter in reported] == [DeadLetterReason.DUPLICATE_ID]


@pytest.mark.parametrize(
    "escapes", ["\\\\" * 90_000, '\\"' * 90_000, "\\n" * 300_000], ids=["slashes", "quotes", "lines"]
)
def test_a_body_full_of_escaped_characters_is_compared_whole(
    leases: Leases, reported: list[DeadLetter], redis_client: "redis.Redis", escapes: str
) -> None:
    def written(end: str, space: str = "") -> str:
        return f'{{"body":{space}"{escapes}{end}", "headers": {{"id": "r"}}, "properties": {{"delivery_info": {{}}}}}}'

    redis_client.lpush(LISTS[0], written("a"), written("a", " "), written("b"))
    assert [leased.body for leased in take(leases)] == [written("a").encode()]
    assert [letter.reason for letter in reported] == [DeadLetterReason.DUPLICATE_ID]


def test_a_delayed_message_keeps_its_id(
    leases: Leases, reported: list[DeadLetter], redis_client: "redis.Redis"
) -> None:
    redis_client.lpush(LISTS[0], raw("r", eta="2099-01-01T00:00:00"))
    [leased] = take(leases)
    leases.postpone(leased.lease_id, 3600)
    redis_client.lpush(LISTS[0], raw("r", b"another"), raw("r"))
    assert take(leases) == []
    assert [letter.reason for letter in reported] == [DeadLetterReason.DUPLICATE_ID]
    redis_client.zadd(leases_key(QUEUE), {leased.lease_id: 1})
    leases.reap(QUEUE)
    assert [again.bound_id for again in take(leases)] == ["r"]


def end_by_ack(leases: Leases, leased: LeasedMessage) -> None:
    leases.ack(leased.lease_id)


def end_by_dead_letter(leases: Leases, leased: LeasedMessage) -> None:
    leases.dead_letter(leased.lease_id, DeadLetterReason.POISON, "x")


def end_by_limit(leases: Leases, leased: LeasedMessage) -> None:
    for _ in range(2):
        leases.requeue(leased.lease_id, is_counted=True)
        take(leases)


def end_by_purge(leases: Leases, leased: LeasedMessage) -> None:
    leases.requeue(leased.lease_id)
    leases.purge(LISTS)


@pytest.mark.parametrize("end", [end_by_ack, end_by_dead_letter, end_by_limit, end_by_purge])
def test_an_id_is_free_again_when_its_message_is_gone(
    leases: Leases,
    reported: list[DeadLetter],
    redis_client: "redis.Redis",
    end: Callable[[Leases, LeasedMessage], None],
) -> None:
    redis_client.lpush(LISTS[0], raw("r"))
    [leased] = take(leases)
    leases.requeue(leased.lease_id)
    [leased] = take(leases)
    assert bound(redis_client) == {b"r": leased.lease_id.encode()}
    end(leases, leased)
    assert bound(redis_client) == {}
    assert {letter.bound_id for letter in reported} <= {"r"}
    redis_client.lpush(LISTS[0], raw("r", b"another"))
    assert [again.bound_id for again in take(leases)] == ["r"]


def test_a_message_past_its_delivery_limit_still_has_its_id_and_the_digest_of_its_stream(
    leases: Leases, reported: list[DeadLetter], redis_client: "redis.Redis"
) -> None:
    redis_client.lpush(LISTS[0], raw("r"))
    [leased] = take(leases)
    end_by_limit(leases, leased)
    [letter] = reported
    assert (letter.reason, letter.bound_id) == ("delivery limit", "r")
    writer = StreamWriter(redis_client, 60)
    writer.claim("r", "w", content=letter.content)
    error = ErrorInfo("dead_letter", "x")
    assert writer.end_unclaimed("r", "error", error, "of another") is Ending.OF_ANOTHER_MESSAGE
    assert writer.end_unclaimed("r", "error", error, letter.content) is Ending.WRITTEN


@pytest.mark.parametrize("spelled", ['"headers" : {', '"\\u0068eaders": {', '"headers":\n\n{'])
def test_an_id_that_the_scripts_cannot_read_is_bound_by_the_worker(
    leases: Leases, reported: list[DeadLetter], redis_client: "redis.Redis", spelled: str
) -> None:
    redis_client.lpush(LISTS[0], raw("r"), raw("r", b"odd").replace(b'"headers": {', spelled.encode()))
    redis_client.lpush(LISTS[0], raw("s", b"odd").replace(b'"headers": {', spelled.encode()))
    first, *others = take(leases)
    assert leases.bind(first, "r") is not None
    for leased in others:
        names_r = b'"r"' in leased.body
        is_bound = leases.bind(leased, json.loads(leased.body)["headers"]["id"]) is not None
        assert is_bound is not names_r
        if names_r:
            leases.dead_letter(leased.lease_id, DeadLetterReason.DUPLICATE_ID)
    assert set(bound(redis_client)) == {b"r", b"s"}
    assert all(letter.bound_id is None for letter in reported)


def test_the_ids_of_messages_that_an_earlier_version_ended_are_deleted(
    leases: Leases, redis_client: "redis.Redis"
) -> None:
    redis_client.lpush(LISTS[0], *(raw(f"r{number}") for number in range(5)))
    kept = take(leases)[0]
    for lease_id in redis_client.hkeys(lease_bodies_key(QUEUE)):
        if lease_id.decode() != kept.lease_id:
            redis_client.hdel(lease_bodies_key(QUEUE), lease_id)
    leases.reap(QUEUE)
    assert bound(redis_client) == {b"r0": kept.lease_id.encode()}


def test_a_dead_letter_whose_id_another_message_has_is_not_requeued(
    leases: Leases, redis_client: "redis.Redis"
) -> None:
    redis_client.lpush(LISTS[0], raw("r"))
    end_by_dead_letter(leases, take(leases)[0])
    redis_client.lpush(LISTS[0], raw("r", b"another"))
    [alive] = take(leases)
    StreamWriter(redis_client, 60).claim("r", "w")
    assert requeue(redis_client, dead_letters(redis_client, QUEUE)) == []
    assert redis_client.exists(stream_key("r"))
    leases.ack(alive.lease_id)
    assert len(requeue(redis_client, dead_letters(redis_client, QUEUE))) == 1


def test_a_wrong_type_of_the_request_ids_key_loses_no_message(leases: Leases, redis_client: "redis.Redis") -> None:
    redis_client.lpush(LISTS[0], raw("r"))
    [leased] = take(leases)
    redis_client.rename(lease_requests_key(QUEUE), "kept")
    redis_client.set(lease_requests_key(QUEUE), "somebody wrote a string here")
    redis_client.lpush(LISTS[0], raw("s"))
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        take(leases)
    leases.ack(leased.lease_id)  # pending until the key is repaired
    redis_client.rename("kept", lease_requests_key(QUEUE))
    leases.tick()
    assert [again.bound_id for again in take(leases)] == ["s"]
    assert set(bound(redis_client)) == {b"s"}


def test_a_stream_belongs_to_the_message_of_the_queue_that_began_it(redis_client: "redis.Redis") -> None:
    envelope = message(b"mine", request_id="r")
    first, second = (content_digest(envelope, queue) for queue in (QUEUE, "headrace.n"))
    writer = StreamWriter(redis_client, 60)
    writer.claim("r", "w", content=first)
    assert writer.claim("r", "w", content=second).is_of_another_message
    assert writer.end_unclaimed("r", "error", None, second) is Ending.OF_ANOTHER_MESSAGE
    assert not writer.claim("r", "w", content=first).is_of_another_message


@pytest.mark.parametrize("earlier_begins", [True, False])
def test_a_stream_goes_on_between_a_worker_and_one_of_an_earlier_version(
    redis_client: "redis.Redis", earlier_begins: bool
) -> None:
    envelope = message(b"mine", request_id="r")
    digests = [content_digest(envelope, QUEUE)[:32], content_digest(envelope, QUEUE)]
    begun, resumed = digests if earlier_begins else digests[::-1]
    writer = StreamWriter(redis_client, 60)
    writer.claim("r", "w", content=begun)
    ((_, first),) = redis_client.xrange(stream_key("r"))
    assert unpack(first[b"data"])["content"] == digests[0], "a worker of the earlier version compares it as a whole"
    assert not writer.claim("r", "w", content=resumed).is_of_another_message
    other = content_digest(message(b"another", request_id="r"), QUEUE)
    assert writer.claim("r", "w", content=other).is_of_another_message


def test_a_claim_of_other_content_reads_and_writes_nothing(redis_client: "redis.Redis") -> None:
    writer = StreamWriter(redis_client, 60)
    writer.claim("r", "w", content="first")
    for _ in range(2):
        before = redis_client.xrange(stream_key("r"))
        claim = writer.claim("r", "thief", content="second")
        assert (claim.is_of_another_message, claim.entries, claim.ended) == (True, [], None)
        assert redis_client.xrange(stream_key("r")) == before
        writer.publish([StreamWrite.end("r", 1, 0, finish_reason="stop")])
    assert writer.claim("r", "w", content="first").ended is not None


@pytest.mark.parametrize(
    "planted", ["18446744073709551615-18446744073709551615", "1-18446744073709551614", "9007199254740993-0"]
)
@pytest.mark.parametrize("by_end", [False, True], ids=["claimed", "ended"])
def test_a_planted_stream_refuses_neither_a_claim_nor_an_end(
    redis_client: "redis.Redis", planted: str, by_end: bool
) -> None:
    writer = StreamWriter(redis_client, 60)
    redis_client.xadd(stream_key("r"), {"type": "chunk"}, id=planted)
    redis_client.lpush("headrace:losses:r", "of another type")
    if by_end:
        assert writer.end_unclaimed("r", "error", None, "content") is Ending.WRITTEN
    else:
        claim = writer.claim("r", "w", content="content")
        assert (claim.attempt, claim.has_replaced, claim.engine_losses) == (1, True, 0)
    assert len(redis_client.xrange(stream_key("r"))) == 1
    assert redis_client.zcard(leases_key(QUEUE)) == 0
