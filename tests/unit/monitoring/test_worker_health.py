"""When a worker is ready, and when it should be restarted."""

from __future__ import annotations

import pytest

from headrace_monitoring.health import WorkerHealth
from headrace_monitoring.labels import WorkerState
from unit.monitoring.scrape import Clock


@pytest.fixture
def health(clock: Clock) -> WorkerHealth:
    return WorkerHealth(heartbeat_timeout=10, step_timeout=30, clock=clock)


@pytest.mark.parametrize("state", ["loading", "draining"])
def test_a_worker_that_loads_or_drains_is_alive_and_not_ready(health: WorkerHealth, state: WorkerState) -> None:
    health.heartbeat(in_flight=0)
    health.state(state)
    assert health.not_ready() == f"the worker is {state}"
    assert health.not_alive() is None


def test_a_worker_that_loads_says_how_much_of_the_weights_it_has(health: WorkerHealth) -> None:
    health.loading(0.456)
    assert health.not_ready() == "the worker is loading: 46 % of the weights"
    health.state("draining")
    assert health.not_ready() == "the worker is draining"


def test_a_worker_that_redis_gives_nothing_is_alive_and_not_ready_until_it_does(health: WorkerHealth) -> None:
    health.state("ready")
    health.heartbeat(in_flight=0)
    health.queue_blocked("WRONGTYPE the key k holds a string")
    assert health.not_ready() == "the queue cannot be served: WRONGTYPE the key k holds a string"
    assert health.not_alive() is None
    health.queue_blocked(None)
    assert health.not_ready() is None


def test_a_worker_whose_loop_turns_is_ready(health: WorkerHealth) -> None:
    health.state("ready")
    health.heartbeat(in_flight=0)
    assert health.not_ready() is None
    assert health.not_alive() is None


def test_a_worker_that_still_starts_is_alive_however_long_it_takes(health: WorkerHealth, clock: Clock) -> None:
    clock.now += 3600
    assert health.not_alive() is None


def test_a_loop_that_stopped_turning_is_not_alive(health: WorkerHealth, clock: Clock) -> None:
    health.state("ready")
    health.heartbeat(in_flight=0)
    clock.now += 11
    assert health.not_alive() == "no heartbeat for 11 s (limit 10 s)"
    assert health.not_ready() == health.not_alive()


def test_an_engine_with_work_and_no_step_is_not_alive(health: WorkerHealth, clock: Clock) -> None:
    health.state("ready")
    for _ in range(7):
        health.heartbeat(in_flight=2)
        clock.now += 5
    health.heartbeat(in_flight=2)
    assert health.not_alive() == "requests in flight and no step for 35 s (limit 30 s)"
    health.stepped()
    assert health.not_alive() is None


def test_an_idle_hour_does_not_count_against_the_next_request(health: WorkerHealth, clock: Clock) -> None:
    health.state("ready")
    health.heartbeat(in_flight=1)
    health.stepped()
    health.heartbeat(in_flight=0)
    clock.now += 3600
    health.heartbeat(in_flight=1)
    assert health.not_alive() is None


def test_an_engine_that_is_replaced_has_time_to_load(health: WorkerHealth, clock: Clock) -> None:
    health.state("ready")
    health.heartbeat(in_flight=1)
    health.state("loading")
    clock.now += 600
    health.heartbeat(in_flight=1)
    assert health.not_alive() is None
    health.state("ready")
    clock.now += 9
    assert health.not_alive() is None
