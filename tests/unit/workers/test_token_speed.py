"""A worker's speed is measured while it is busy, in the tokens that requests cost."""

from __future__ import annotations

import pytest

from headrace_broker.models.registry import read_models
from headrace_engine.core.outputs import EngineCoreOutput
from headrace_engine.requests.request import FinishReason
from headrace_workers.requests.token_speed import HALF_LIFE_SECONDS, LEAST_SECONDS, TokenSpeed
from unit.workers.desk import Desk
from unit.workers.fakes import FakeCeleryRequest, step


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Run:
    """A worker that computes `rate` tokens in each second."""

    def __init__(self) -> None:
        self.clock, self.num_tokens = Clock(), 0
        self.speed = TokenSpeed(self.clock)

    def go_on(self, seconds: int, rate: int, *, is_busy: bool = True) -> float | None:
        for _ in range(seconds):
            self.clock.now += 1
            self.num_tokens += rate
            self.speed.observe(self.num_tokens, is_busy=is_busy)
        return self.speed.tokens_per_second


def test_no_speed_is_reported_before_the_worker_was_busy_for_long_enough() -> None:
    run = Run()
    assert run.go_on(int(LEAST_SECONDS), 100) is None
    assert run.go_on(2, 100) == pytest.approx(100)


def test_a_worker_that_is_not_busy_keeps_its_speed() -> None:
    run = Run()
    run.go_on(30, 100)
    assert run.go_on(300, 3, is_busy=False) == pytest.approx(100)
    assert run.go_on(1, 5) == pytest.approx(100)  # the second in which it became busy does not count


def test_a_busy_second_counts_half_after_the_half_life() -> None:
    run = Run()
    run.go_on(601, 100)
    assert run.go_on(int(HALF_LIFE_SECONDS), 200) == pytest.approx(150, rel=0.01)


def test_a_worker_that_publishes_nothing_has_no_speed() -> None:
    assert Run().go_on(100, 0) is None


def test_what_is_counted_is_what_the_requests_cost() -> None:
    desk = Desk()
    requests = [
        FakeCeleryRequest("r1", {"prompt": "abc", "sampling_params": {"max_tokens": 4, "n": 2}}),
        FakeCeleryRequest("r2"),
    ]
    for request in requests:
        desk.accept(request)
    for counts, finish in (((1, 1, 1), None), ((2, 1, 3), FinishReason.LENGTH)):
        desk.watch.on_engine_outputs(
            step(
                *(
                    EngineCoreOutput(request_id=choice.request_id, new_token_ids=[13] * count, finish_reason=finish)
                    for choice, count in zip(desk.engine.sent, counts, strict=True)
                )
            )
        )
    desk.assert_idle()
    assert desk.results.keys() == {"r1", "r2"}
    usages = [result["usage"] for result in desk.results.values()]
    cost = sum(usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    assert desk.watch.in_flight.num_tokens_published == cost > 9


@pytest.mark.parametrize(("num_requests", "num_waiting", "is_registered"), [(4, 0, True), (3, 0, False), (3, 1, True)])
def test_the_speed_is_registered_as_soon_as_it_is_known(
    num_requests: int, num_waiting: int, is_registered: bool
) -> None:
    desk, clock = Desk(), Clock()
    desk.watch._speed = TokenSpeed(clock)
    for number in range(num_requests):
        params = {"max_tokens": 100, "ignore_eos": True}
        desk.accept(FakeCeleryRequest(f"r{number}", {"prompt": "abc", "sampling_params": params}))
    for _ in range(15):
        outputs = [EngineCoreOutput(request_id=each.request_id, new_token_ids=[13]) for each in desk.engine.sent]
        desk.watch.on_engine_outputs(step(*outputs, waiting=num_waiting))
        desk.dispatcher.heartbeat()
        clock.now += 1
    speed = read_models(desk.redis.registered)["tiny"].tokens_per_second
    assert speed == (pytest.approx(num_requests) if is_registered else None)
