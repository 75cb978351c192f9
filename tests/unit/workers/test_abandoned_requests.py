"""Requests whose readers have gone: they are cancelled, in the queue and while they run."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_engine.requests.request import FinishReason
from unit.workers.desk import Desk
from unit.workers.fakes import AWAY, FakeCeleryRequest


@pytest.fixture
def desk() -> Desk:
    return Desk()


def be_silent(desk: Desk, seconds: float) -> None:
    desk.redis.milliseconds_left["headrace:listener:r1"] = int(1000 * (86_400 - seconds))
    desk.in_flight._listeners._available_since -= seconds


def test_an_abandoned_request_is_cancelled_and_keeps_its_tokens(desk: Desk) -> None:
    desk.accept(FakeCeleryRequest(abandon_after=30))
    assert desk.redis.entries("r1")[0][3]["abandon_after"] == 30
    desk.generate(13)
    desk.dispatcher.heartbeat()
    assert len(desk.in_flight) == 1
    be_silent(desk, 31)
    desk.dispatcher.heartbeat()
    desk.assert_idle()
    message = "no subscriber sent a heartbeat for 30 s, the request's abandon_after"
    assert desk.results["r1"]["error"] == {"code": "cancelled", "message": message}
    assert desk.results["r1"]["outputs"][0]["token_ids"] == [13]
    assert desk.redis.end("r1")["finish_reason"] == "cancelled"
    assert desk.engine.aborted == [request.request_id for request in desk.engine.sent]


def test_a_request_abandoned_in_the_queue_never_runs(desk: Desk) -> None:
    desk.redis.values["headrace:listener:r1"] = 30
    be_silent(desk, 31)
    desk.accept(FakeCeleryRequest(abandon_after=30))
    desk.assert_idle()
    assert desk.engine.sent == []
    assert desk.results["r1"]["error"]["code"] == "cancelled"


def test_an_outage_without_subscriber_heartbeats_abandons_no_request(desk: Desk) -> None:
    desk.accept(FakeCeleryRequest(abandon_after=30))
    desk.redis.error = AWAY
    desk.generate(13)
    desk.dispatcher.heartbeat()
    desk.redis.error = None
    be_silent(desk, 29)
    desk.redis.milliseconds_left["headrace:listener:r1"] = 0
    desk.dispatcher.heartbeat()
    assert len(desk.in_flight) == 1


@pytest.mark.parametrize("odd", [0, -1, 3601, "30", True, float("nan"), None], ids=lambda _: "")
def test_an_invalid_abandon_after_counts_as_absent(desk: Desk, odd: Any) -> None:
    desk.accept(FakeCeleryRequest(abandon_after=odd))
    desk.generate(13, finish=FinishReason.LENGTH)
    desk.assert_idle()
    assert "abandon_after" not in desk.redis.entries("r1")[0][3]
    assert desk.redis.values == {}
