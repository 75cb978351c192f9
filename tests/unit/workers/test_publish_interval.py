"""Tokens of one publish interval are written as one chunk."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from clock import Clock
from headrace_engine.core.outputs import EngineCoreOutput
from headrace_engine.requests.request import FinishReason
from headrace_workers.requests.publisher import Publisher
from unit.workers.desk import Desk
from unit.workers.fakes import CAPABILITIES, MODEL, FakeCeleryRequest, step

INTERVAL = 0.5


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    others = SimpleNamespace(monotonic=clock, time=time.time, perf_counter=time.perf_counter)
    monkeypatch.setattr("headrace_workers.requests.in_flight.time", others)
    return clock


@pytest.fixture
def desk(clock: Clock) -> Desk:  # the clock comes first
    return Desk(publish_interval=INTERVAL)


def chunks(desk: Desk, request_id: str = "r1") -> list[str]:
    return [data["text"] for _, _, kind, data in desk.redis.entries(request_id) if kind == "chunk"]


def test_tokens_of_one_interval_are_one_chunk_except_the_first_and_the_last(desk: Desk, clock: Clock) -> None:
    desk.accept(FakeCeleryRequest())
    shown = []
    for token_id in (13, 14, 15, 16, 17):
        desk.generate(token_id)
        shown.append(chunks(desk))
        clock.now += INTERVAL * 0.4
    desk.generate(18, finish=FinishReason.LENGTH)
    assert shown == [["d"], ["d"], ["d"], ["d", "efg"], ["d", "efg"]]
    assert chunks(desk) == ["d", "efg", "hi"]
    clock.now += 10
    desk.hub.advance()
    desk.assert_idle()
    assert desk.results["r1"]["outputs"][0]["token_ids"] == [13, 14, 15, 16, 17, 18]
    assert desk.value("headrace_generation_tokens_total") == 6
    assert desk.value("headrace_inter_token_latency_seconds_count") == 5


def test_steps_that_take_longer_than_the_interval_are_each_published(desk: Desk, clock: Clock) -> None:
    desk.accept(FakeCeleryRequest())
    for token_id in (13, 14, 15):
        desk.generate(token_id)
        clock.now += INTERVAL
    assert chunks(desk) == ["d", "e", "f"]
    assert desk.hub.pending() == []


def test_a_first_token_does_not_wait_for_another_request(desk: Desk) -> None:
    desk.accept(FakeCeleryRequest("r1"))
    desk.generate(13)
    desk.accept(FakeCeleryRequest("r2"))
    desk.generate(14, 15)
    assert (chunks(desk, "r1"), chunks(desk, "r2")) == (["d"], ["f"])


def test_held_back_output_is_published_by_a_step_with_outputs_of_others_only(desk: Desk, clock: Clock) -> None:
    desk.accept(FakeCeleryRequest("r1"))
    desk.accept(FakeCeleryRequest("r2"))
    desk.generate(13, 13)
    desk.generate(14, 14)
    clock.now += INTERVAL
    _, other = desk.engine.sent
    desk.watch.on_engine_outputs(step(EngineCoreOutput(other.request_id, [15])))
    assert (chunks(desk, "r1"), chunks(desk, "r2")) == (["d", "e"], ["d", "ef"])
    desk.hub.advance()
    assert desk.hub.pending() == []


def test_nothing_is_held_back_for_longer_than_two_intervals_when_no_step_ends(desk: Desk, clock: Clock) -> None:
    desk.accept(FakeCeleryRequest())
    desk.generate(13)
    desk.generate(14)
    assert chunks(desk) == ["d"]
    assert desk.hub.pending() == [2 * INTERVAL]
    clock.now += 2 * INTERVAL
    desk.hub.advance()
    assert chunks(desk) == ["d", "e"]
    assert desk.hub.pending() == []


def test_the_timer_does_not_publish_output_held_back_after_a_later_publish(desk: Desk, clock: Clock) -> None:
    desk.accept(FakeCeleryRequest())
    desk.generate(13)
    desk.generate(14)
    clock.now += INTERVAL * 1.5
    desk.generate(15)
    desk.generate(16)
    assert chunks(desk) == ["d", "ef"]
    clock.now += INTERVAL * 0.5
    desk.hub.advance()
    assert chunks(desk) == ["d", "ef"]
    clock.now += INTERVAL * 1.5
    desk.hub.advance()
    assert chunks(desk) == ["d", "ef", "g"]


def test_a_stop_string_ends_the_choice_in_the_step_that_completes_it(desk: Desk) -> None:
    params = {"max_tokens": 9, "stop": ["ef"]}
    desk.accept(FakeCeleryRequest("r1", {"prompt": "abc", "sampling_params": params}))
    for token_id in (13, 14, 15):
        desk.generate(token_id)
    desk.settle()
    assert desk.text("r1") == "d"
    assert desk.results["r1"]["outputs"][0]["stop_reason"] == "ef"
    assert desk.engine.aborted == [desk.engine.sent[0].request_id]


def test_a_lost_engine_loses_no_held_back_output(desk: Desk, clock: Clock) -> None:
    """Isolation needs the requests to resume at the token that killed the engine."""
    desk.accept(FakeCeleryRequest())
    for token_id in (13, 14, 15):
        desk.generate(token_id)
    desk.engine.sent.clear()
    desk.watch.on_engine_lost("killed", "crash", was_ready=True)
    assert chunks(desk) == ["d", "ef"]
    desk.watch.on_engine_ready(MODEL, CAPABILITIES)
    assert desk.engine.sent[0].output_token_ids == [13, 14, 15]
    clock.now += 10
    desk.hub.advance()
    desk.generate(16, finish=FinishReason.LENGTH)
    desk.assert_idle()
    assert desk.results["r1"]["outputs"][0]["token_ids"] == [13, 14, 15, 16]


def test_a_new_connection_renews_the_timer_that_celery_may_have_cancelled(desk: Desk, clock: Clock) -> None:
    desk.accept(FakeCeleryRequest())
    desk.generate(13)
    desk.generate(14)
    for timer in desk.hub.timers:
        timer.cancel()
    for _ in range(3):
        desk.dispatcher.attach(desk.hub)
    assert desk.hub.pending() == [INTERVAL]
    clock.now += INTERVAL
    desk.hub.advance()
    assert chunks(desk) == ["d", "e"]
    desk.dispatcher.attach(desk.hub)
    assert desk.hub.pending() == []


def test_an_error_of_the_timer_fails_the_engine_as_in_a_step(
    desk: Desk, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.accept(FakeCeleryRequest())
    desk.generate(13)
    desk.generate(14)
    clock.now += 2 * INTERVAL

    def fail(*_: object) -> None:
        raise ValueError("no reason")

    monkeypatch.setattr(Publisher, "add", fail)
    desk.hub.advance()
    assert [str(failure) for failure in desk.engine.failures] == ["no reason"]


def test_the_time_between_tokens_is_measured_for_each_choice(desk: Desk, clock: Clock) -> None:
    params = {"max_tokens": 9, "n": 2}
    desk.accept(FakeCeleryRequest("r1", {"prompt": "abc", "sampling_params": params}))
    for _ in range(4):
        desk.generate(13, 13)
        clock.now += INTERVAL / 5
    first, second = desk.engine.sent
    end = EngineCoreOutput(first.request_id, [14], finish_reason=FinishReason.LENGTH)
    desk.watch.on_engine_outputs(step(end, EngineCoreOutput(second.request_id, [14])))
    clock.now += INTERVAL / 5
    desk.watch.on_engine_outputs(step(EngineCoreOutput(second.request_id, [14])))
    assert desk.value("headrace_inter_token_latency_seconds_count") == 4 + 5
    assert desk.value("headrace_inter_token_latency_seconds_sum") == pytest.approx(9 * INTERVAL / 5)


def test_a_deadline_publishes_held_back_output() -> None:
    desk = Desk(publish_interval=60)
    desk.accept(FakeCeleryRequest(expires=datetime.now(UTC) + timedelta(seconds=5)))
    for token_id in (13, 14, 15):
        desk.generate(token_id)
    desk.hub.advance()
    desk.settle()
    assert chunks(desk) == ["d", "ef"]
    assert desk.redis.end("r1")["finish_reason"] == "expired"
    assert desk.value("headrace_generation_tokens_total") == 3
