"""Observations that wait until somebody looks."""

from collections import Counter
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from headrace_monitoring.metrics import DeferredObservations, Metrics, Publication
from unit.monitoring.scrape import STEP


@pytest.fixture
def deferred() -> DeferredObservations:
    return DeferredObservations()


def test_nothing_is_observed_before_somebody_looks_and_then_all_of_it_in_its_order(
    deferred: DeferredObservations,
) -> None:
    seen: list[int] = []
    for number in range(3):
        deferred.add(seen.append, number)
    assert seen == []
    deferred.flush()
    assert seen == [0, 1, 2]
    deferred.flush()
    assert seen == [0, 1, 2]


def test_a_registry_that_is_read_shows_what_waited(deferred: DeferredObservations) -> None:
    registry = CollectorRegistry()
    registry.register(deferred)
    level = Gauge("level", "Of the water.", registry=registry)
    deferred.add(level.set, 3)
    assert b"level 3.0" in generate_latest(registry)
    deferred.add(level.set, 4)
    assert registry.get_sample_value("level") == 4


def test_an_observation_that_fails_is_logged_and_holds_up_no_other(
    deferred: DeferredObservations, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []

    def fail() -> None:
        raise ValueError("no number")

    deferred.add(fail)
    deferred.add(seen.append, 1)
    deferred.flush()
    assert seen == [1]
    assert "ValueError" in caplog.text


@pytest.mark.parametrize("looks", [Metrics.heartbeat, Metrics.exposition], ids=["heartbeat", "scrape"])
def test_what_steps_leave_does_not_gather(metrics: Metrics, looks: Callable[[Metrics], object]) -> None:
    for _ in range(100):
        metrics.step(STEP)
        metrics.published(Publication(1, Counter({(1, 0.1, None): 1}), 0.001, 0.001))
        metrics.entries_written(1, 0.001)
    assert len(metrics._deferred) == 300
    looks(metrics)
    assert len(metrics._deferred) == 0
