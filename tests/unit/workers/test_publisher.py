"""The publisher writes entries, and keeps them while Redis fails."""

from __future__ import annotations

import pytest

from headrace_broker.streams.writer import StreamWrite, StreamWriter, WriteOutcome
from headrace_monitoring.metrics import Metrics
from headrace_workers.requests.publisher import REPLAY_SECONDS, Publisher
from unit.workers.fakes import AWAY, OUT_OF_MEMORY, FakeRedis


@pytest.fixture
def redis() -> FakeRedis:
    return FakeRedis()


@pytest.fixture
def publisher(redis: FakeRedis) -> Publisher:
    writer = StreamWriter(redis, 60)  # type: ignore[arg-type]
    writer.claim("a", "w")
    writer.claim("b", "w")
    return Publisher(writer, Metrics(model="tiny", queue="headrace.tiny"))


def chunk(request_id: str, offset: int, attempt: int = 1) -> StreamWrite:
    return StreamWrite.chunk(request_id, attempt, offset, index=0, token_ids=[offset], text="x")


def offsets(redis: FakeRedis, request_id: str) -> list[int]:
    return [offset for _, offset, kind, _ in redis.entries(request_id) if kind == "chunk"]


def test_all_added_entries_are_written_in_one_call(publisher: Publisher, redis: FakeRedis) -> None:
    publisher.add(chunk("a", 1), chunk("b", 1))
    publisher.add(chunk("a", 2))
    assert len(publisher) == 3
    assert publisher.flush() == {}
    assert len(publisher) == 0
    assert redis.publishes == 1
    assert (offsets(redis, "a"), offsets(redis, "b")) == ([1, 2], [1])
    assert publisher.flush() == {}
    assert redis.publishes == 1


@pytest.mark.parametrize("error", [AWAY, OUT_OF_MEMORY, OSError("no route")])
def test_entries_wait_for_redis_and_keep_their_order(publisher: Publisher, redis: FakeRedis, error: Exception) -> None:
    redis.error = error
    publisher.add(chunk("a", 1))
    assert publisher.flush() is None
    publisher.add(chunk("a", 2))
    assert publisher.flush(retry=True) is None
    redis.error = None
    assert publisher.flush(retry=True) == {}
    assert offsets(redis, "a") == [1, 2]
    publisher.add(chunk("a", 3))
    assert publisher.flush() == {}


def test_after_a_failure_only_a_retry_writes_again(publisher: Publisher, redis: FakeRedis) -> None:
    redis.error = AWAY
    publisher.add(chunk("a", 1))
    assert publisher.flush() is None
    redis.error = None
    publisher.add(chunk("a", 2))
    assert publisher.flush() is None
    assert redis.publishes == 0
    assert publisher.flush(retry=True) == {}
    assert offsets(redis, "a") == [1, 2]


def test_a_lost_reply_repeats_no_entry(publisher: Publisher, redis: FakeRedis) -> None:
    publisher.add(chunk("a", 1), chunk("a", 2))
    publisher.flush()
    publisher.add(chunk("a", 1), chunk("a", 2), chunk("a", 3))
    assert publisher.flush() == {}
    assert offsets(redis, "a") == [1, 2, 3]


def test_refused_attempts_are_returned_and_the_others_written(publisher: Publisher, redis: FakeRedis) -> None:
    redis.streams["headrace:stream:a"].append((2, 0, "start", {"worker": "another"}))
    publisher.add(chunk("a", 1), chunk("gone", 1), chunk("b", 1))
    assert publisher.flush() == {("a", 1): WriteOutcome.FENCED, ("gone", 1): WriteOutcome.GONE}
    assert offsets(redis, "b") == [1]


def test_entries_of_a_dropped_attempt_are_not_written(publisher: Publisher, redis: FakeRedis) -> None:
    publisher.add(chunk("a", 1), chunk("b", 1), chunk("a", 2))
    publisher.drop(("a", 1))
    publisher.flush()
    assert (offsets(redis, "a"), offsets(redis, "b")) == ([], [1])


def roll_back(redis: FakeRedis, request_id: str, tokens: int) -> None:
    """Lose the entries after so many tokens, as a replica that takes over."""
    key = f"headrace:stream:{request_id}"
    redis.streams[key] = [entry for entry in redis.streams[key] if entry[1] <= tokens]


def test_entries_that_the_server_lost_are_written_again(publisher: Publisher, redis: FakeRedis) -> None:
    for offset in (1, 2, 3):
        publisher.add(chunk("a", offset), chunk("b", offset))
        assert publisher.flush() == {}
    roll_back(redis, "a", 1)
    publisher.add(chunk("a", 4), chunk("b", 4))
    assert publisher.flush() == {}
    assert (offsets(redis, "a"), offsets(redis, "b")) == ([1, 2, 3, 4], [1, 2, 3, 4])
    assert len(publisher) == 0


def test_entries_of_a_dropped_attempt_are_not_written_to_a_later_one_of_its_number(
    publisher: Publisher, redis: FakeRedis
) -> None:
    for offset in (1, 2, 3):
        publisher.add(chunk("a", offset), chunk("b", offset))
        publisher.flush()
    publisher.drop(("a", 1))
    roll_back(redis, "a", 1)
    roll_back(redis, "b", 1)
    publisher.add(chunk("a", 4), chunk("b", 4))  # of the next attempt, which got the lost attempt's number
    assert publisher.flush() == {("a", 1): WriteOutcome.ROLLED_BACK}
    assert (offsets(redis, "a"), offsets(redis, "b")) == ([1], [1, 2, 3, 4])


def test_entries_older_than_the_replay_time_cannot_be_written_again(redis: FakeRedis) -> None:
    now = 0.0
    writer = StreamWriter(redis, 60)  # type: ignore[arg-type]
    writer.claim("a", "w")
    publisher = Publisher(writer, Metrics(model="tiny", queue="headrace.tiny"), clock=lambda: now)
    for offset in (1, 2, 3):
        publisher.add(chunk("a", offset))
        publisher.flush()
        now += 2 * REPLAY_SECONDS
    roll_back(redis, "a", 1)
    publisher.add(chunk("a", 4))
    assert publisher.flush() == {("a", 1): WriteOutcome.ROLLED_BACK}
    assert offsets(redis, "a") == [1]


def test_a_stream_lost_with_its_server_does_not_count_as_deleted(publisher: Publisher, redis: FakeRedis) -> None:
    publisher.add(chunk("a", 1))
    publisher.flush()
    redis.error = AWAY
    publisher.add(chunk("a", 2))
    publisher.flush()
    redis.error = None
    del redis.streams["headrace:stream:a"]
    assert publisher.flush(retry=True) == {("a", 1): WriteOutcome.ROLLED_BACK}
