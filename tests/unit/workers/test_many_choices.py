"""Requests with several choices use the engine's slots as several requests, and leave room for others."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_broker.keys import ALL_STEPS
from headrace_engine.api.input_processor import request_of_choice
from headrace_engine.core.outputs import EngineCoreOutput
from headrace_engine.requests.request import FinishReason
from unit.workers.desk import Desk
from unit.workers.fakes import CAPABILITIES, MODEL, FakeCeleryRequest, step


@pytest.fixture
def desk() -> Desk:
    return Desk()


def request(name: str, n: int = 1, **headers: Any) -> FakeCeleryRequest:
    params = {"max_tokens": 4, "n": n}
    return FakeCeleryRequest(name, {"prompt": "abc", "sampling_params": params}, lease_id=f"lease of {name}", **headers)


def end_next(desk: Desk, name: str) -> None:
    """Let the engine end the first choice of this request that it runs."""
    choice = next(
        choice.request_id
        for choice in desk.engine.sent
        if request_of_choice(choice.request_id) == name and choice.request_id not in desk.engine.ended
    )
    desk.engine.ended.add(choice)
    desk.watch.on_engine_outputs(step(EngineCoreOutput(choice, [13], finish_reason=FinishReason.LENGTH)))


def indexes(desk: Desk) -> list[int]:
    return [int(choice.request_id.split(":")[1]) for choice in desk.engine.sent]


def num_running(desk: Desk) -> int:
    return len(desk.engine.sent) - len(desk.engine.ended)


def test_a_request_whose_choices_fit_beside_the_reserve_goes_to_the_engine_whole(desk: Desk) -> None:
    desk.accept(request("three", 3))
    assert num_running(desk) == 3
    assert desk.admission.split_below() == ALL_STEPS


def test_a_request_with_as_many_choices_as_slots_leaves_a_slot_to_others(desk: Desk) -> None:
    desk.accept(request("all", 4))
    assert num_running(desk) == 3
    desk.accept(request("small"))
    assert num_running(desk) == 4
    assert desk.admission.free_slots() == 0
    end_next(desk, "small")
    assert (num_running(desk), desk.admission.free_slots()) == (3, 1)


def test_a_request_with_several_choices_leaves_the_reserve_to_others_while_another_one_runs(desk: Desk) -> None:
    desk.accept(request("first", 3))
    desk.accept(request("second", 3))
    assert (num_running(desk), desk.admission.free_slots()) == (3, 1)
    end_next(desk, "first")
    assert (num_running(desk), desk.admission.free_slots()) == (3, 1)
    assert indexes(desk) == [0, 1, 2, 0]


def test_a_request_larger_than_the_engine_is_computed_in_turns_and_leaves_a_slot_to_others(desk: Desk) -> None:
    desk.accept(request("large", 10))
    for small in ("a", "b", "c"):
        assert num_running(desk) == 3
        assert desk.admission.free_slots() == 1
        desk.accept(request(small))
        assert num_running(desk) == 4
        end_next(desk, small)
        end_next(desk, "large")
    while desk.in_flight.get("large"):
        end_next(desk, "large")
        assert num_running(desk) <= 4
    desk.assert_idle()
    assert [output["token_ids"] for output in desk.results["large"]["outputs"]] == [[13]] * 10


def test_while_a_request_is_computed_in_turns_others_that_do_not_fit_return_to_the_queue(desk: Desk) -> None:
    desk.accept(request("large", 10))
    second = desk.accept(request("second", 2))
    assert (second.fate, second.delivery.choices) == (["requeued"], 2)
    assert desk.admission.split_below() == 0
    assert desk.value("headrace_queue_returned_messages_total", reason="no_room") == 1
    assert num_running(desk) == 3


def test_a_request_that_does_not_fit_starts_with_one_free_slot(desk: Desk) -> None:
    for small in ("a", "b", "c"):
        desk.accept(request(small))
    assert desk.admission.split_below() == ALL_STEPS
    desk.accept(request("two", 2))
    assert num_running(desk) == 4
    assert desk.admission.split_below() == 0
    end_next(desk, "a")
    assert (num_running(desk), desk.admission.free_slots()) == (3, 1)
    end_next(desk, "b")
    assert (num_running(desk), desk.admission.free_slots()) == (3, 1)
    assert desk.admission.split_below() == ALL_STEPS


@pytest.mark.parametrize("num_small", [0, 3])
def test_an_endless_supply_of_small_requests_does_not_starve_one_with_many_choices(desk: Desk, num_small: int) -> None:
    names = (f"small{number}" for number in range(100))
    running = [desk.accept(request(next(names))).id for _ in range(num_small)]
    assert desk.admission.split_below() == ALL_STEPS
    desk.accept(request("large", 10))
    for _ in range(40):
        if desk.in_flight.get("large") is None:
            return
        while desk.admission.free_slots():
            running.append(desk.accept(request(next(names))).id)
        assert num_running(desk) == 4
        running.append("large")
        end_next(desk, running.pop(0))
    pytest.fail("the request with many choices did not end")


def test_a_better_request_with_several_choices_takes_the_slots_of_one_that_is_computed_in_turns(desk: Desk) -> None:
    large = desk.accept(request("large", 10, step=9))
    assert desk.admission.split_below() == 9
    desk.accept(request("better", 2, step=0))
    assert large.fate == ["accepted", "preempted"]
    assert indexes(desk)[3:] == [0, 1]


def test_choices_are_sent_in_turns_to_a_new_engine_too(desk: Desk) -> None:
    desk.accept(request("large", 10))
    end_next(desk, "large")
    desk.watch.on_engine_lost("killed", "crash", was_ready=True)
    desk.engine.sent.clear()
    desk.engine.ended.clear()
    desk.watch.on_engine_ready(MODEL, CAPABILITIES)
    assert indexes(desk) == [1, 2, 3]


def test_the_choices_of_messages_in_preparation_need_free_slots(desk: Desk) -> None:
    desk.quick.is_held = True
    desk.accept(request("prepared", 3, choices=3))
    assert desk.admission.free_slots() == 1
    desk.quick.answer()
    assert num_running(desk) == 3
