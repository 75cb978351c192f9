"""Abandoned requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace_broker.streams.listeners import Listeners
from headrace_workers.requests.streams import ListenerWatch
from unit.workers.fakes import AWAY, FakeRedis

LONG_AGO = 1000.0


class Room:
    """A watch whose clock and Redis the test sets."""

    def __init__(self) -> None:
        self.now = LONG_AGO
        self.redis = FakeRedis()
        self.watch = ListenerWatch(Listeners(self.redis), clock=lambda: self.now)  # type: ignore[arg-type]
        self.now += LONG_AGO

    def be_silent(self, request_id: str, seconds: float) -> None:
        self.redis.milliseconds_left[f"headrace:listener:{request_id}"] = int(1000 * (86_400 - seconds))


def job(request_id: str = "r", abandon_after: float | None = 30.0) -> Any:
    return SimpleNamespace(request_id=request_id, abandon_after=abandon_after)


@pytest.fixture
def room() -> Room:
    return Room()


def test_a_request_is_abandoned_only_after_its_own_time_without_heartbeats(room: Room) -> None:
    jobs = [job("read"), job("abandoned"), job("long limit", 3600.0), job("no limit", None)]
    assert room.watch.abandoned(jobs) == []  # counted from now, as no client has sent a heartbeat
    room.be_silent("read", 29)
    room.be_silent("abandoned", 30)
    room.be_silent("long limit", 3599)
    assert room.watch.abandoned(jobs) == [jobs[1]]
    assert room.watch.is_abandoned(jobs[1])
    assert not room.watch.is_abandoned(jobs[0])
    assert not room.watch.is_abandoned(jobs[3])


def test_redis_is_not_asked_if_no_request_has_abandon_after(room: Room) -> None:
    room.redis.error = AWAY
    assert room.watch.abandoned([job(abandon_after=None)]) == []
    assert room.watch._available_since == LONG_AGO


@pytest.mark.parametrize("how", ["asked", "told", "began"])
def test_no_request_is_abandoned_until_redis_was_available_for_as_long(room: Room, how: str) -> None:
    if how == "began":
        room.watch = ListenerWatch(Listeners(room.redis), clock=lambda: room.now)  # type: ignore[arg-type]
    room.watch.abandoned([job()])
    room.be_silent("r", 5000)
    if how == "asked":
        room.redis.error = AWAY
        assert not room.watch.is_abandoned(job())
        room.redis.error = None
    elif how == "told":
        room.watch.redis_was_away()
    assert room.watch.abandoned([job()]) == []
    room.now += 29
    assert room.watch.abandoned([job()]) == []
    room.now += 1
    assert len(room.watch.abandoned([job()])) == 1


def test_only_the_keys_of_ended_requests_are_deleted(room: Room) -> None:
    for request_id in "ac":
        room.redis.streams[f"headrace:stream:{request_id}"] = [(1, 1, "end", {})]
    room.watch.abandoned([job("a"), job("b")])
    room.watch.is_abandoned(job("c"))
    assert set(room.redis.values) == {f"headrace:listener:{name}" for name in "abc"}
    room.watch.abandoned([job("b"), job("c")])
    assert set(room.redis.values) == {f"headrace:listener:{name}" for name in "bc"}
    room.watch.abandoned([])
    assert set(room.redis.values) == {"headrace:listener:b"}  # another worker's now
