"""The publisher: what is written, and what happens while Redis does not take it."""

from __future__ import annotations

import pytest

from headrace_broker.streams import StreamWrite, StreamWriter, WriteOutcome
from headrace_monitoring.metrics import Metrics
from headrace_workers.publisher import Publisher
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


def test_all_that_was_added_is_written_at_once(publisher: Publisher, redis: FakeRedis) -> None:
    publisher.add([chunk("a", 1), chunk("b", 1)])
    publisher.add([chunk("a", 2)])
    assert len(publisher) == 3
    assert publisher.flush() == {}
    assert len(publisher) == 0
    assert redis.publishes == 1
    assert (offsets(redis, "a"), offsets(redis, "b")) == ([1, 2], [1])
    assert publisher.flush() == {}
    assert redis.publishes == 1


@pytest.mark.parametrize("error", [AWAY, OUT_OF_MEMORY, OSError("no route")])
def test_entries_wait_until_redis_takes_them_and_keep_their_order(
    publisher: Publisher, redis: FakeRedis, error: Exception
) -> None:
    redis.error = error
    publisher.add([chunk("a", 1)])
    assert publisher.flush() is None
    publisher.add([chunk("a", 2)])
    assert publisher.flush(retry=True) is None
    redis.error = None
    assert publisher.flush(retry=True) == {}
    assert offsets(redis, "a") == [1, 2]
    publisher.add([chunk("a", 3)])
    assert publisher.flush() == {}


def test_after_a_failure_only_a_retry_asks_redis_again(publisher: Publisher, redis: FakeRedis) -> None:
    redis.error = AWAY
    publisher.add([chunk("a", 1)])
    assert publisher.flush() is None
    redis.error = None
    publisher.add([chunk("a", 2)])
    assert publisher.flush() is None
    assert redis.publishes == 0
    assert publisher.flush(retry=True) == {}
    assert offsets(redis, "a") == [1, 2]


def test_a_reply_that_was_lost_doubles_nothing(publisher: Publisher, redis: FakeRedis) -> None:
    publisher.add([chunk("a", 1), chunk("a", 2)])
    publisher.flush()
    publisher.add([chunk("a", 1), chunk("a", 2), chunk("a", 3)])
    assert publisher.flush() == {}
    assert offsets(redis, "a") == [1, 2, 3]


def test_refused_requests_are_named_and_the_others_written(publisher: Publisher, redis: FakeRedis) -> None:
    redis.streams["headrace:stream:a"].append((2, 0, "start", {"worker": "another"}))
    publisher.add([chunk("a", 1), chunk("gone", 1), chunk("b", 1)])
    assert publisher.flush() == {("a", 1): WriteOutcome.FENCED, ("gone", 1): WriteOutcome.GONE}
    assert offsets(redis, "b") == [1]


def test_what_was_dropped_is_not_written(publisher: Publisher, redis: FakeRedis) -> None:
    publisher.add([chunk("a", 1), chunk("b", 1), chunk("a", 2)])
    publisher.drop(("a", 1))
    publisher.flush()
    assert (offsets(redis, "a"), offsets(redis, "b")) == ([], [1])
