"""The thread that stores, announces and acknowledges."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from headrace_workers.requests.finisher import Finisher


@pytest.fixture
def finisher() -> Iterator[Finisher]:
    finisher = Finisher()
    yield finisher
    finisher.stop()
    finisher._thread.join(60)
    assert not finisher._thread.is_alive()


def never(_error: Exception) -> None:
    raise AssertionError("not to be called")


def wait(finisher: Finisher) -> None:
    """Wait until all calls submitted so far have run."""
    done = threading.Event()
    finisher.submit(done.set, never)
    assert done.wait(60)


def test_calls_run_in_their_order_on_one_other_thread(finisher: Finisher) -> None:
    done: list[tuple[int, int]] = []
    for number in range(20):
        finisher.submit(lambda number=number: done.append((number, threading.get_ident())), never)  # type: ignore[misc]
    wait(finisher)
    assert [number for number, _ in done] == list(range(20))
    [thread] = {thread for _, thread in done}
    assert thread != threading.get_ident()


def test_it_is_busy_until_the_last_call_has_ended(finisher: Finisher) -> None:
    started, may_end = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        assert may_end.wait(60)

    finisher.submit(work, never)
    finisher.submit(lambda: None, never)
    assert started.wait(60)
    assert finisher.busy == 2
    may_end.set()
    finisher.stop()
    finisher._thread.join(60)
    assert finisher.busy == 0


def test_a_failure_is_reported_and_the_next_call_runs(finisher: Finisher) -> None:
    failures: list[Exception] = []

    def work() -> None:
        raise OSError("no result backend")

    finisher.submit(work, failures.append)
    wait(finisher)
    assert [str(failure) for failure in failures] == ["no result backend"]
