"""kombu's poller beside an event loop that is a dictionary."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_broker.keys import ALL_STEPS
from headrace_broker.queue import blocking_wait
from headrace_broker.queue.blocking_wait import WaitPoller


def poller_of(*descriptors: int) -> WaitPoller:
    poller = WaitPoller()
    poller._fd_to_chan = dict.fromkeys(descriptors, (None, "BRPOP"))
    return poller


def test_a_descriptor_that_the_event_loop_reads_is_not_added_again() -> None:
    def read() -> None: ...

    readers: dict[int, tuple[Any, ...]] = {}
    poller = poller_of(3, 4)
    poller.set_readers(read, readers)
    assert set(poller.fds) == {3, 4}
    readers[3] = (read, (3,))
    assert set(poller.fds) == {4}


def test_a_descriptor_that_the_loop_forgot_or_reads_for_another_is_added() -> None:
    def read() -> None: ...

    readers: dict[int, tuple[Any, ...]] = {3: (read, (3,)), 4: (print, ())}
    poller = poller_of(3, 4)
    poller.set_readers(read, readers)
    del readers[3]
    assert set(poller.fds) == {3, 4}


class FakeChannel:
    def __init__(self, can_consume: Callable[[], bool]) -> None:
        self.qos = SimpleNamespace(can_consume=can_consume)

    def on_wait(self, _wait: object) -> bool:
        return False

    def split_below(self) -> int:
        return ALL_STEPS

    def schedule_remaining_preempting(self) -> None:
        """Do nothing: its fetches leave no messages."""


class Watched:
    """A poller with one channel, on a clock that the test sets. It counts the checks of all connections."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.has_free_slots, self.checks = 100.0, True, 0
        monkeypatch.setattr(blocking_wait.time, "monotonic", lambda: self.now)
        self.poller = WaitPoller()
        self.poller.add(FakeChannel(lambda: self.has_free_slots))

    def checks_in_turns(self, turns: int = 1) -> int:
        before = self.checks
        for _ in range(turns):
            self.poller.prepare(self._check)
        return self.checks - before

    def _check(self) -> None:
        self.checks += 1

    def read(self) -> None:
        """Do what the event loop does when Redis answers a blocking wait."""
        channel = FakeChannel(lambda: True)
        wait = object.__new__(blocking_wait.BlockingWait)
        self.poller._fd_to_chan[9] = (channel, wait)
        self.poller.on_readable(9)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched = Watched(monkeypatch)
    assert watched.checks_in_turns() == 1
    return watched


def test_turns_without_a_read_check_no_connection(watched: Watched) -> None:
    assert watched.checks_in_turns(5) == 0


@pytest.mark.parametrize(
    "happens",
    [
        lambda watched: watched.read(),
        lambda watched: setattr(watched, "has_free_slots", False),
        lambda watched: watched.poller.add(FakeChannel(lambda: True)),
        lambda watched: setattr(watched, "now", watched.now + blocking_wait._CHECK_SECONDS),
    ],
    ids=["a connection was read", "no slot is free", "a channel was added", "a second has passed"],
)
def test_all_connections_are_checked_before_the_next_poll_if(
    watched: Watched, happens: Callable[[Watched], object]
) -> None:
    happens(watched)
    assert watched.checks_in_turns(3) == 1


def test_a_failed_check_is_repeated(watched: Watched) -> None:
    watched.read()

    def lost() -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        watched.poller.prepare(lost)
    assert watched.checks_in_turns() == 1
