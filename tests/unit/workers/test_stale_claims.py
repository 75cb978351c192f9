"""A worker whose claim is stale asks the queue for a higher grant, or leaves the request to the holder of the lease."""

from __future__ import annotations

import time

import pytest

from headrace_broker.streams.grant import Grant
from headrace_engine.requests.request import FinishReason
from unit.workers.desk import Desk
from unit.workers.fakes import AWAY, FakeCeleryRequest

MINE, OTHER = "m" * 32, "o" * 32
STREAM = "headrace:stream:r1"


@pytest.fixture
def desk() -> Desk:
    return Desk()


def begin(desk: Desk, *attempts: int) -> None:
    """Let other leases have begun these attempts."""
    desk.redis.streams[STREAM] = [
        (number, 0, "start", {"worker": "another", "content": "content", "owner": OTHER}) for number in attempts
    ]


def test_the_attempt_has_the_number_of_the_lease(desk: Desk) -> None:
    request = desk.accept(FakeCeleryRequest(grant=Grant(3, MINE)))
    desk.generate(13, finish=FinishReason.LENGTH)
    desk.assert_idle()
    assert [entry[:3] for entry in desk.redis.entries("r1")] == [(3, 0, "start"), (3, 1, "chunk"), (3, 2, "end")]
    assert desk.redis.entries("r1")[0][3]["owner"] == MINE
    assert request.fate == ["accepted"]


def test_a_stale_claim_is_repeated_with_a_higher_grant_until_it_succeeds(desk: Desk) -> None:
    begin(desk, 4)
    request = FakeCeleryRequest(grant=Grant(3, MINE))
    request.regrants = [Grant(4, MINE), Grant(5, MINE)]  # the first one is too low
    desk.accept(request)
    desk.generate(13, finish=FinishReason.LENGTH)
    desk.assert_idle()
    asked = "asked for a grant above 4"
    assert request.fate == [asked, asked, "accepted"]
    assert [entry[:2] for entry in desk.redis.entries("r1")] == [(4, 0), (5, 0), (5, 1), (5, 2)]


def test_a_stale_claim_of_a_lost_lease_leaves_the_request_to_its_new_worker(desk: Desk) -> None:
    begin(desk, 1, 2)
    request = FakeCeleryRequest(grant=Grant(1, MINE))
    request.regrants = [None]
    desk.accept(request)
    desk.assert_idle()
    assert request.fate == ["asked for a grant above 2", "let go"]
    assert len(desk.redis.entries("r1")) == 2
    assert desk.results == {}
    assert desk.engine.sent == []
    assert desk.value("headrace_leases_lost_total") == 1


def test_if_the_queue_does_not_answer_the_request_is_returned(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(desk, 2)
    request = FakeCeleryRequest(grant=Grant(1, MINE))

    def fail(_at_least: int) -> Grant | None:
        raise AWAY

    monkeypatch.setattr(request, "regrant", fail)
    desk.accept(request)
    assert request.fate == ["requeued"]
    desk.dispatcher.heartbeat()
    desk.assert_idle()


@pytest.mark.parametrize(("attempts", "num_waits"), [((), 1), ((1,), 0)])
def test_the_first_attempt_counts_its_wait_whatever_its_number_is(
    desk: Desk, attempts: tuple[int, ...], num_waits: int
) -> None:
    """The time to the first token is that of the request, and unknown to a worker that continues it."""
    if attempts:
        begin(desk, *attempts)
    desk.accept(FakeCeleryRequest(grant=Grant(5, MINE), queued_at=time.monotonic()))
    desk.generate(13, finish=FinishReason.LENGTH)
    desk.assert_idle()
    assert desk.value("headrace_time_to_first_token_seconds_count") == num_waits
