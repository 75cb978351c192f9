import logging

import pytest

from headrace_engine.system.load_progress import RECORD_FIELD, with_progress


class Clock:
    """A clock that advances by a number of seconds each time it is read."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_a_long_load_tells_its_share_by_size(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert list(with_progress([1, 2, 5], 8, float, Clock(2.0))) == [1, 2, 5]
    assert [getattr(record, RECORD_FIELD) for record in caplog.records] == [1 / 8, 3 / 8, 1.0]
    assert caplog.messages == ["loading the weights: 12 %", "loading the weights: 37 %", "loading the weights: 100 %"]


def test_a_short_load_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert list(with_progress(range(1000), 1000, clock=Clock(0.001))) == list(range(1000))
    assert list(with_progress([], 0)) == []
    assert caplog.messages == []
