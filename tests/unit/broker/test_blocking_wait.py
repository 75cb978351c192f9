"""kombu's poller beside an event loop that is a dictionary."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_broker import doorbell
from headrace_broker.doorbell import DoorbellPoller


def poller_of(*descriptors: int) -> DoorbellPoller:
    poller = DoorbellPoller()
    poller._fd_to_chan = dict.fromkeys(descriptors, (None, "BRPOP"))
    return poller


def test_what_the_event_loop_reads_is_not_added_again() -> None:
    def read() -> None: ...

    readers: dict[int, tuple[Any, ...]] = {}
    poller = poller_of(3, 4)
    poller.read_by(read, readers)
    assert set(poller.fds) == {3, 4}
    readers[3] = (read, (3,))
    assert set(poller.fds) == {4}


def test_a_descriptor_that_the_loop_forgot_or_reads_for_another_is_added() -> None:
    def read() -> None: ...

    readers: dict[int, tuple[Any, ...]] = {3: (read, (3,)), 4: (print, ())}
    poller = poller_of(3, 4)
    poller.read_by(read, readers)
    del readers[3]
    assert set(poller.fds) == {3, 4}


class FakeChannel:
    def __init__(self, can_consume: Callable[[], bool]) -> None:
        self.qos = SimpleNamespace(can_consume=can_consume)

    def on_doorbell(self, _bell: object) -> bool:
        return False

    def await_left_better(self) -> None:
        """Its fetches leave nothing."""


class Watched:
    """A poller with one channel, on a clock that the test sets; counts how often all connections are looked through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.credit, self.looks = 100.0, True, 0
        monkeypatch.setattr(doorbell.time, "monotonic", lambda: self.now)
        self.poller = DoorbellPoller()
        self.poller.add(FakeChannel(lambda: self.credit))

    def looks_in_turns(self, turns: int = 1) -> int:
        before = self.looks
        for _ in range(turns):
            self.poller.prepare(self._look)
        return self.looks - before

    def _look(self) -> None:
        self.looks += 1

    def read(self) -> None:
        """What the event loop calls where a doorbell is answered."""
        channel = FakeChannel(lambda: True)
        bell = object.__new__(doorbell.Doorbell)
        self.poller._fd_to_chan[9] = (channel, bell)
        self.poller.on_readable(9)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched = Watched(monkeypatch)
    assert watched.looks_in_turns() == 1
    return watched


def test_turns_in_which_nothing_was_read_look_through_no_connection(watched: Watched) -> None:
    assert watched.looks_in_turns(5) == 0


@pytest.mark.parametrize(
    "happens",
    [
        lambda watched: watched.read(),
        lambda watched: setattr(watched, "credit", False),
        lambda watched: watched.poller.add(FakeChannel(lambda: True)),
        lambda watched: setattr(watched, "now", watched.now + doorbell._LOOK_SECONDS),
    ],
    ids=["a connection was read", "the credit is used up", "a channel came", "a second has passed"],
)
def test_all_connections_are_looked_through_before_the_next_wait_where(
    watched: Watched, happens: Callable[[Watched], object]
) -> None:
    happens(watched)
    assert watched.looks_in_turns(3) == 1


def test_a_look_that_failed_is_taken_again(watched: Watched) -> None:
    watched.read()

    def lost() -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        watched.poller.prepare(lost)
    assert watched.looks_in_turns() == 1
