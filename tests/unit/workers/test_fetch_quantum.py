"""A worker takes a few messages, and the next ones when its engine begins a step with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_engine.core.outputs import EngineCoreOutput
from headrace_engine.requests.request import FinishReason
from headrace_workers.engine_link.adapters import Adapters
from headrace_workers.preparation.process import QUICK_BODY_BYTES
from headrace_workers.requests.fetch_quantum import QUANTA_ALONE
from unit.workers.desk import Desk
from unit.workers.fakes import CAPABILITIES, MODEL, FakeCeleryRequest, step

QUANTUM = 4


@pytest.fixture
def desk() -> Desk:
    return Desk(max_num_seqs=64, fetch_quantum=QUANTUM)


def ask(desk: Desk, name: str, n: int = 1) -> FakeCeleryRequest:
    kwargs = {"prompt": "abc", "sampling_params": {"max_tokens": 30, "n": n}}
    return desk.accept(FakeCeleryRequest(name, kwargs, lease_id=name, choices=n))


def test_no_more_messages_are_prepared_than_the_engine_may_begin_in_one_step(desk: Desk) -> None:
    desk.slow.is_held = desk.quick.is_held = True
    for number in range(QUANTUM):
        assert desk.admission.free_slots() == QUANTUM - number
        ask(desk, f"r{number}")
    assert desk.admission.free_slots() == 0


def test_messages_that_are_prepared_and_those_for_the_next_step_count_together(desk: Desk) -> None:
    ask(desk, "begins")
    ask(desk, "for the next step")
    desk.slow.is_held = desk.quick.is_held = True
    ask(desk, "prepared")
    assert desk.admission.free_slots() == QUANTUM - 2


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


def test_as_many_choices_as_ended_may_be_taken_besides_the_quantum(desk: Desk) -> None:
    for name in ("first", "second", "third"):
        ask(desk, name)
    desk.generate(13, 13, 13)
    ended = [request.request_id for request in desk.engine.sent[:2]]
    desk.watch.on_engine_outputs(
        step(
            *(
                EngineCoreOutput(request_id=name, new_token_ids=[13], finish_reason=FinishReason.LENGTH)
                for name in ended
            )
        )
    )
    assert desk.admission.free_slots() == QUANTUM + len(ended)
    ask(desk, "fourth")
    assert desk.admission.free_slots() == QUANTUM + len(ended) - 1
    desk.watch.on_engine_outputs(step())
    assert desk.admission.free_slots() == QUANTUM


def test_what_ended_before_the_engine_became_idle_does_not_count(desk: Desk) -> None:
    for name in ("first", "second"):
        ask(desk, name)
    desk.generate(13, 13, finish=FinishReason.LENGTH)
    assert desk.admission.free_slots() == QUANTUM
    desk.engine.sent.clear()
    ask(desk, "begins after that")
    assert desk.admission.free_slots() == QUANTUM


def test_what_ended_in_an_earlier_engine_does_not_count(desk: Desk) -> None:
    for name in ("ends", "continues"):
        ask(desk, name)
    desk.generate(13, 13)
    ended = desk.engine.sent[0].request_id
    desk.watch.on_engine_outputs(
        step(EngineCoreOutput(request_id=ended, new_token_ids=[13], finish_reason=FinishReason.LENGTH))
    )
    desk.watch.on_engine_lost("killed", "crash", was_ready=True)
    desk.watch.on_engine_ready(MODEL, CAPABILITIES)
    assert desk.admission.free_slots() == QUANTUM


@pytest.mark.parametrize(
    "slow",
    [{"prompt": "x" * (QUICK_BODY_BYTES + 1)}, {"prompt": "abc", "lora": "nosuch"}],
    ids=["long prompt", "adapter"],
)
def test_every_second_slow_message_does_not_count(slow: dict[str, str], tmp_path: Path) -> None:
    desk = Desk(max_num_seqs=64, fetch_quantum=QUANTUM, adapters=Adapters({}, str(tmp_path)))
    desk.slow.is_held = True
    for number in range(2 * QUANTUM):
        assert desk.admission.free_slots() == QUANTUM - number // 2
        kwargs = {**slow, "sampling_params": {"max_tokens": 30}}
        desk.accept(FakeCeleryRequest(f"slow {number}", kwargs, lease_id=f"slow {number}"))
    assert desk.admission.free_slots() == 0


def test_a_worker_that_is_alone_takes_more(desk: Desk) -> None:
    desk.admission.is_alone = lambda: True
    assert desk.admission.free_slots() == QUANTUM * QUANTA_ALONE
