"""The event loop's longest turn is measured, whenever it happens."""

from __future__ import annotations

import os

import pytest
from kombu.asynchronous import Hub

from headrace_workers.requests.dispatcher import LoopWatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def test_the_longest_turn_is_measured_without_the_waits() -> None:
    clock = Clock()
    watch = LoopWatch(clock)
    for work, wait in ((0.02, 5.0), (0.7, 1.0), (0.1, 2.0)):
        watch.poll(lambda wait=wait: clock.advance(wait))
        clock.advance(work)
    assert watch.longest_turn() == pytest.approx(0.7)
    clock.advance(0.2)
    assert watch.longest_turn() == pytest.approx(0.3)  # the current turn, from its beginning


def test_a_turn_of_kombus_loop_is_measured() -> None:
    clock = Clock()
    hub, watch = Hub(), LoopWatch(clock)
    reader, writer = os.pipe()
    try:
        watch.attach(hub)
        watch.attach(hub)  # again, after a reconnect that kept the poller
        hub.add_reader(reader, lambda: (os.read(reader, 1), clock.advance(0.3)))
        os.write(writer, b"x")
        hub.run_once()
        assert watch.longest_turn() == pytest.approx(0.3)
        hub.reset()
        watch.attach(hub)
        assert watch.longest_turn() == 0.0
        hub.add_reader(reader, lambda: (os.read(reader, 1), clock.advance(0.4)))
        os.write(writer, b"x")
        hub._loop = None
        hub.run_once()
        assert watch.longest_turn() == pytest.approx(0.4)
    finally:
        hub.close()
        os.close(reader)
        os.close(writer)


def test_the_time_of_a_pause_is_not_measured() -> None:
    clock = Clock()
    watch = LoopWatch(clock)
    watch.poll(lambda: None)
    watch.pause()
    clock.advance(30.0)
    assert watch.longest_turn() == 0.0
