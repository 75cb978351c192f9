"""Requests to which nobody listens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace_broker.listeners import Listeners
from headrace_workers.listener_watch import ListenerWatch
from unit.workers.fakes import AWAY, FakeRedis

LONG_AGO = 1000.0


class Room:
    """A watch whose clock and Redis the test turns."""

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


def test_only_a_request_that_was_not_listened_to_for_so_long_is_abandoned(room: Room) -> None:
    jobs = [job("heard"), job("unheard"), job("patient", 3600.0), job("free", None)]
    assert room.watch.abandoned(jobs) == []  # they count from now, as no client has said that it listens
    room.be_silent("heard", 29)
    room.be_silent("unheard", 30)
    room.be_silent("patient", 3599)
    assert room.watch.abandoned(jobs) == [jobs[1]]
    assert room.watch.is_abandoned(jobs[1])
    assert not room.watch.is_abandoned(jobs[0])
    assert not room.watch.is_abandoned(jobs[3])


def test_nothing_is_asked_where_no_request_wants_listeners(room: Room) -> None:
    room.redis.error = AWAY
    assert room.watch.abandoned([job(abandon_after=None)]) == []
    assert room.watch._available_since == LONG_AGO


@pytest.mark.parametrize("how", ["asked", "told", "began"])
def test_nobody_is_judged_until_redis_has_been_there_for_as_long(room: Room, how: str) -> None:
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


def test_the_key_of_a_request_that_is_over_is_deleted_and_no_other(room: Room) -> None:
    for request_id in "ac":
        room.redis.streams[f"headrace:stream:{request_id}"] = [(1, 1, "end", {})]
    room.watch.abandoned([job("a"), job("b")])
    room.watch.is_abandoned(job("c"))
    assert set(room.redis.values) == {f"headrace:listener:{name}" for name in "abc"}
    room.watch.abandoned([job("b"), job("c")])
    assert set(room.redis.values) == {f"headrace:listener:{name}" for name in "bc"}
    room.watch.abandoned([])
    assert set(room.redis.values) == {"headrace:listener:b"}  # another worker's now
