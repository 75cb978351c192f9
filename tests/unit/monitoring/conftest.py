"""A worker's metrics on a clock that the test sets."""

from __future__ import annotations

import pytest

from headrace_monitoring.labels import LabelSets
from headrace_monitoring.metrics import Metrics
from unit.monitoring.scrape import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> Metrics:
    sets = LabelSets(adapters=("sql",))
    return Metrics(model="tiny", queue="headrace.tiny", version="1.2.3", label_sets=sets, clock=clock)
