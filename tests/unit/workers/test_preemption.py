"""Running requests are preempted for requests of higher priority."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace_broker.keys import engine_losses_key, stream_key
from headrace_workers.requests.isolation import SUSPECT_LOSSES
from headrace_workers.requests.settlement import EXPIRED
from unit.workers.desk import Desk
from unit.workers.fakes import AWAY, CAPABILITIES, FakeCeleryRequest, step

GREEDY = {"max_tokens": 9, "temperature": 0}


def accept(desk: Desk, request_id: str, step: int, prompt: str = "abc", **params: Any) -> FakeCeleryRequest:
    headers = {name: params.pop(name) for name in ("preemptions", "due", "abandon_after") if name in params}
    kwargs = {"prompt": prompt, "sampling_params": {"max_tokens": 9, **params}}
    return desk.accept(FakeCeleryRequest(request_id, kwargs, lease_id=request_id, step=step, **headers))


def running(desk: Desk) -> list[str]:
    return [job.request_id for job in desk.in_flight]


def test_the_request_of_the_lowest_priority_is_preempted() -> None:
    desk = Desk(max_num_seqs=3)
    accept(desk, "middle", 3)
    worst = accept(desk, "worst", 9)
    accept(desk, "bad", 6)
    assert desk.admission.preemptible_slots() == (9, 1)

    accept(desk, "best", 0)

    assert worst.fate == ["accepted", "preempted"]
    assert running(desk) == ["middle", "bad", "best"]
    assert desk.value("headrace_queue_returned_messages_total", reason="preempted") == 1


def test_among_equals_the_request_with_the_fewest_tokens_is_preempted() -> None:
    desk = Desk(max_num_seqs=3)
    for request_id, prompt in (("long", "abcdefgh"), ("short", "ab"), ("middle", "abcd")):
        accept(desk, request_id, 9, prompt)
    for job in desk.in_flight:
        job.admitted_at = job.received_at

    accept(desk, "best", 0)

    assert running(desk) == ["long", "middle", "best"]


def test_a_request_that_waits_in_the_engine_is_preempted_first() -> None:
    desk = Desk(max_num_seqs=2)
    accept(desk, "computed", 9, "a")
    accept(desk, "waiting", 9, "abcdefgh")
    desk.in_flight.get("computed").admitted_at = 1.0  # type: ignore[union-attr]

    accept(desk, "best", 0)

    assert running(desk) == ["computed", "best"]


def test_a_request_of_higher_priority_is_taken_while_lower_ones_wait_in_the_engine() -> None:
    desk = Desk(max_num_seqs=4)
    for request_id in ("computed", "waiting"):
        accept(desk, request_id, 6)
    desk.in_flight.get("computed").admitted_at = 1.0  # type: ignore[union-attr]
    desk.watch.on_engine_outputs(step(waiting=1))
    assert desk.admission.free_slots() == 0
    assert desk.admission.preemptible_slots() == (6, 1)

    accept(desk, "best", 0)

    assert running(desk) == ["computed", "waiting", "best"]


def test_a_request_of_higher_priority_is_taken_before_one_that_the_engine_preempted() -> None:
    desk = Desk(max_num_seqs=4)
    for request_id in ("computed", "evicted"):
        accept(desk, request_id, 9)
        desk.in_flight.get(request_id).admitted_at = 1.0  # type: ignore[union-attr]
    desk.watch.on_engine_outputs(step(waiting=1))

    assert desk.admission.preemptible_slots() == (9, 1)


def test_no_more_requests_of_higher_priority_are_taken_than_wait_in_the_engine() -> None:
    desk = Desk(max_num_seqs=8)
    for request_id in ("one", "other"):
        accept(desk, request_id, 9)
    desk.watch.on_engine_outputs(step(waiting=2))
    assert desk.admission.preemptible_slots() == (9, 2)

    accept(desk, "better", 0)
    desk.watch.on_engine_outputs(step(waiting=2))

    assert desk.admission.preemptible_slots() == (9, 1)


def test_a_request_of_equal_step_is_not_taken_while_others_wait_in_the_engine() -> None:
    desk = Desk(max_num_seqs=4)
    accept(desk, "computed", 0)
    accept(desk, "waiting", 0)
    desk.watch.on_engine_outputs(step(waiting=1))

    assert desk.admission.preemptible_slots()[0] == 0


def test_requests_of_equal_and_higher_priority_are_not_preempted() -> None:
    desk = Desk(max_num_seqs=2)
    accept(desk, "equal", 3)
    accept(desk, "better", 0)

    accept(desk, "new", 3)

    assert running(desk) == ["equal", "better", "new"]


def test_a_free_slot_is_used_before_a_request_is_preempted() -> None:
    desk = Desk(max_num_seqs=2)
    accept(desk, "worse", 9)
    assert desk.admission.preemptible_slots() == (0, 0)

    accept(desk, "best", 0)

    assert running(desk) == ["worse", "best"]


def test_each_choice_of_the_request_of_higher_priority_gets_a_slot() -> None:
    desk = Desk(max_num_seqs=4)
    accept(desk, "pair", 9, n=2, temperature=1)
    accept(desk, "one", 9)
    accept(desk, "other", 9)
    assert desk.admission.preemptible_slots() == (9, 4)

    accept(desk, "best", 0, n=3, temperature=1)

    assert desk.in_flight.slots_used <= 4
    assert "best" in running(desk)


def test_the_stream_of_a_preempted_request_has_its_tokens_and_stays_open() -> None:
    desk = Desk(max_num_seqs=1, publish_interval=60)
    accept(desk, "worse", 9)
    for token_id in (10, 11, 12):
        desk.generate(token_id)

    accept(desk, "best", 0)

    assert desk.text("worse") == "abc"
    assert [kind for _, _, kind, _ in desk.redis.entries("worse")][-1] == "chunk"
    assert desk.engine.aborted == [desk.engine.sent[0].request_id]


def seconds_left(desk: Desk, request_id: str) -> float:
    return float(desk.redis.milliseconds_left[stream_key(request_id)] / 1000)


def test_the_stream_of_a_request_returned_by_a_drain_is_kept_with_it() -> None:
    desk = Desk()
    accept(desk, "drained", 9)

    desk.dispatcher.requeue_all()

    assert seconds_left(desk, "drained") == 86_400


def test_the_stream_of_a_preempted_request_is_kept_until_it_is_claimed_again() -> None:
    desk = Desk(max_num_seqs=1)
    accept(desk, "worse", 9)
    accept(desk, "best", 0)
    assert seconds_left(desk, "worse") == 86_400

    accept(desk, "worse", 9, preemptions=1)

    assert seconds_left(desk, "worse") == 60


def test_a_request_is_preempted_even_if_redis_refuses_to_keep_its_stream() -> None:
    desk = Desk(max_num_seqs=1)
    worse = accept(desk, "worse", 9)
    (job,) = desk.in_flight
    desk.redis.error = AWAY

    desk.in_flight.requeue(job, "preempted", is_preempted=True)

    assert worse.fate == ["accepted", "preempted"]


def test_a_preempted_request_resumes_after_its_last_token() -> None:
    desk = Desk(max_num_seqs=1)
    accept(desk, "worse", 9)
    desk.generate(10)
    best = accept(desk, "best", 0)
    desk.admission.terminate("best")
    desk.settle()
    assert "revoked" in best.fate

    accept(desk, "worse", 9, preemptions=1)

    assert desk.engine.sent[-1].output_token_ids == [10]
    assert [kind for _, _, kind, _ in desk.redis.entries("worse")] == ["start", "chunk", "start"]


@pytest.mark.parametrize("outcome", ["expired", "revoked"])
def test_a_preempted_request_that_ends_in_the_queue_is_charged_for_its_tokens(outcome: str) -> None:
    desk = Desk(max_num_seqs=1)
    accept(desk, "worse", 9)
    desk.generate(10)
    accept(desk, "best", 0)
    again = FakeCeleryRequest("worse", lease_id="worse", step=9, preemptions=1)

    desk.dispatcher.settlement.revoked_in_queue(again, outcome, lambda: None)

    assert again.tokens == len("abc") + 1


def test_a_preempted_request_cancelled_in_the_queue_is_charged_for_its_tokens() -> None:
    desk = Desk(max_num_seqs=2)
    accept(desk, "worse", 9)
    desk.generate(10)
    desk.dispatcher.requeue_all()
    end = {"finish_reason": "cancelled", "usage": None, "error": None}
    desk.redis.entries("worse").append((2, 2, "end", end))

    again = accept(desk, "worse", 9)

    assert again.tokens == len("abc") + 1


def test_a_request_is_preempted_at_most_max_preemptions_times() -> None:
    desk = Desk(max_num_seqs=1, max_preemptions=2)
    accept(desk, "twice", 9, preemptions=2)
    assert desk.admission.preemptible_slots() == (0, 0)

    accept(desk, "best", 0)

    assert running(desk) == ["twice", "best"]


def test_no_request_is_preempted_if_preemption_is_off() -> None:
    desk = Desk(max_num_seqs=1, max_preemptions=0)
    accept(desk, "worse", 9)

    assert desk.admission.preemptible_slots() == (0, 0)


@pytest.mark.parametrize(
    ("exact_resume", "stays"),
    [("all", []), ("greedy", ["sampled"]), ("none", ["greedy", "sampled"])],
)
def test_a_request_that_cannot_resume_exactly_is_not_preempted(exact_resume: Any, stays: list[str]) -> None:
    desk = Desk(max_num_seqs=2, capabilities=replace(CAPABILITIES, exact_resume=exact_resume))
    accept(desk, "greedy", 9, temperature=0)
    accept(desk, "sampled", 9, temperature=1, seed=1)

    accept(desk, "best", 0, n=2, temperature=1)

    assert running(desk) == [*stays, "best"]


def test_messages_under_preparation_are_counted() -> None:
    desk = Desk(max_num_seqs=2)
    accept(desk, "one", 9)
    accept(desk, "other", 9)
    desk.quick.is_held = True
    accept(desk, "best", 0)
    assert desk.admission.preemptible_slots() == (9, 1)
    assert running(desk) == ["one", "other"]  # until the new one is prepared

    desk.quick.answer()

    assert len(running(desk)) == 2
    assert "best" in running(desk)


def test_a_refused_request_preempts_nothing() -> None:
    desk = Desk(max_num_seqs=1)
    accept(desk, "worse", 9)

    accept(desk, "wrong", 0, temperature=-1)

    assert running(desk) == ["worse"]


def test_an_abandoned_request_preempts_nothing() -> None:
    desk = Desk(max_num_seqs=1)
    accept(desk, "worse", 9)
    desk.in_flight._listeners.is_abandoned = lambda job: True  # type: ignore[method-assign]

    accept(desk, "left", 0, abandon_after=30)

    assert running(desk) == ["worse"]
    assert desk.redis.end("left")["finish_reason"] == "cancelled"


def test_a_suspect_preempts_nothing() -> None:
    desk = Desk(max_num_seqs=1)
    worse = accept(desk, "worse", 9)
    desk.redis.values[engine_losses_key("suspect")] = SUSPECT_LOSSES

    accept(desk, "suspect", 0)

    assert worse.fate == ["accepted"]


def test_a_complete_request_preempts_nothing() -> None:
    desk = Desk(max_num_seqs=1)
    accept(desk, "complete", 0)
    desk.generate(10)
    entries = desk.redis.entries("complete")
    entries[-1][3]["finish_reason"] = "length"
    desk.dispatcher.requeue_all()
    worse = accept(desk, "worse", 9)

    accept(desk, "complete", 0)

    assert worse.fate == ["accepted"]
    assert desk.redis.end("complete")["finish_reason"] == "length"


def test_held_back_tokens_are_not_published_if_nothing_can_be_preempted() -> None:
    desk = Desk(max_num_seqs=1, publish_interval=60)
    accept(desk, "worse", 9, preemptions=3)
    for token_id in (10, 11, 12):
        desk.generate(token_id)
    assert desk.text("worse") == "a"

    accept(desk, "best", 0)

    assert desk.text("worse") == "a"


def test_nothing_is_preempted_if_held_back_output_ends_a_request() -> None:
    desk = Desk(max_num_seqs=2, publish_interval=60)
    accept(desk, "ends", 9)
    desk.generate(10)
    stays = accept(desk, "stays", 9)
    in_flight = desk.in_flight
    show = in_flight.publish_held_back

    def end() -> None:
        show()
        in_flight.end(in_flight.get("ends"), "expired", EXPIRED)  # type: ignore[arg-type]

    in_flight.publish_held_back = end  # type: ignore[method-assign]

    accept(desk, "best", 0)

    assert stays.fate == ["accepted"]
    assert running(desk) == ["stays", "best"]


def test_output_that_cannot_be_published_fails_the_engine_and_not_the_preempting_request() -> None:
    desk = Desk(max_num_seqs=1, publish_interval=60)
    accept(desk, "worse", 9)
    for token_id in (10, 11):
        desk.generate(token_id)
    failure = ValueError("no such token")

    def fail(*_: Any, **__: Any) -> None:
        raise failure

    desk.in_flight._show = fail  # type: ignore[method-assign]

    better = accept(desk, "best", 0)

    assert desk.engine.failures == [failure]
    assert better.fate == ["accepted"]
    assert "best" in running(desk)


def test_no_request_of_higher_priority_is_taken_while_the_worker_drains() -> None:
    desk = Desk(max_num_seqs=1)
    accept(desk, "worse", 9)
    desk.dispatcher.drain("command")

    assert desk.admission.preemptible_slots() == (0, 0)


def test_the_wait_of_a_preempted_request_is_observed_once() -> None:
    desk = Desk(max_num_seqs=4)
    desk.accept(FakeCeleryRequest("first", lease_id="first", enqueued_at=1.0))
    desk.accept(FakeCeleryRequest("again", lease_id="again", enqueued_at=1.0, preemptions=1))

    assert desk.value("headrace_queue_received_messages_total") == 2
    assert desk.value("headrace_queue_wait_seconds_count", priority="0") == 1
