"""kombu's poller beside an event loop that is a dictionary."""

from typing import Any

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
