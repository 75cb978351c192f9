"""A worker takes a few messages, and the next ones when its engine begins a step with them."""

from __future__ import annotations

import pytest

from headrace_workers.requests.fetch_quantum import QUANTA_ALONE
from unit.workers.desk import Desk
from unit.workers.fakes import CAPABILITIES, MODEL, FakeCeleryRequest

QUANTUM = 4


@pytest.fixture
def desk() -> Desk:
    return Desk(max_num_seqs=64, fetch_quantum=QUANTUM)


def ask(desk: Desk, name: str, n: int = 1) -> FakeCeleryRequest:
    kwargs = {"prompt": "abc", "sampling_params": {"max_tokens": 30, "n": n}}
    return desk.accept(FakeCeleryRequest(name, kwargs, lease_id=name, choices=n))


def test_messages_of_two_fetches_are_prepared_at_once(desk: Desk) -> None:
    desk.slow.is_held = desk.quick.is_held = True
    for number in range(QUANTUM):
        assert desk.admission.free_slots() == QUANTUM
        ask(desk, f"r{number}")
    for number in range(QUANTUM):
        assert desk.admission.free_slots() == QUANTUM - number
        ask(desk, f"last {number}")
    assert desk.admission.free_slots() == 0


def test_an_idle_engine_begins_at_once_and_the_requests_after_that_wait_for_its_next_step(desk: Desk) -> None:
    ask(desk, "begins")
    assert desk.admission.free_slots() == QUANTUM
    for number in range(QUANTUM):
        ask(desk, f"r{number}")
    assert desk.admission.free_slots() == 0
    desk.generate(*[13] * (QUANTUM + 1))
    assert desk.admission.free_slots() == QUANTUM


def test_each_choice_counts(desk: Desk) -> None:
    ask(desk, "begins")
    ask(desk, "three", n=3)
    assert desk.admission.free_slots() == QUANTUM - 3


def test_free_slots_are_never_more_than_the_engine_has() -> None:
    desk = Desk(max_num_seqs=3, fetch_quantum=QUANTUM)
    assert desk.admission.free_slots() == 3


def test_a_request_that_was_stopped_before_the_next_step_does_not_count(desk: Desk) -> None:
    ask(desk, "begins")
    ask(desk, "stopped")
    assert desk.admission.free_slots() == QUANTUM - 1
    assert desk.admission.terminate("stopped")
    assert desk.admission.free_slots() == QUANTUM


def test_the_next_engine_begins_with_all_requests(desk: Desk) -> None:
    for number in range(3):
        ask(desk, f"r{number}")
    desk.watch.on_engine_lost("killed", "crash", was_ready=True)
    desk.engine.sent.clear()
    desk.watch.on_engine_ready(MODEL, CAPABILITIES)
    assert desk.admission.free_slots() == QUANTUM - 2
    desk.generate(13, 13, 13)
    assert desk.admission.free_slots() == QUANTUM


def test_a_worker_that_is_alone_takes_more(desk: Desk) -> None:
    desk.admission.is_alone = lambda: True
    assert desk.admission.free_slots() == QUANTUM * QUANTA_ALONE
