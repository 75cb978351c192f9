"""The dispatcher under faults: no request is lost, run twice or left over."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from headrace_broker.queue.dead_letters import DeadLetter
from headrace_broker.queue.worker_port import DeliveryInfo
from headrace_engine.core.outputs import EngineCoreOutput
from headrace_engine.requests.request import FinishReason
from unit.workers.desk import Desk
from unit.workers.fakes import AWAY, CAPABILITIES, MODEL, OUT_OF_MEMORY, FakeCeleryRequest, step


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_request_runs_to_its_end_and_leaves_no_state(desk: Desk) -> None:
    request = desk.accept(FakeCeleryRequest())
    assert desk.admission.free_slots() == 3
    desk.generate(13)
    desk.generate(14, finish=FinishReason.LENGTH)
    desk.assert_idle()
    assert desk.text("r1") == "de"
    assert desk.redis.end("r1")["finish_reason"] == "length"
    assert desk.results["r1"]["outputs"][0]["text"] == "de"
    assert request.fate == ["accepted"]
    assert desk.value("headrace_requests_total", outcome="length") == 1
    assert desk.value("headrace_generation_tokens_total") == 2


def test_every_token_is_counted_and_each_after_a_choices_first_step_has_an_interval(desk: Desk) -> None:
    desk.accept(FakeCeleryRequest("r1", {"prompt": "abc", "sampling_params": {"max_tokens": 4, "n": 2}}))
    desk.accept(FakeCeleryRequest("r2"))
    for counts in ((1, 1, 1), (2, 1, 3)):
        outputs = [
            EngineCoreOutput(request_id=choice.request_id, new_token_ids=[13] * count)
            for choice, count in zip(desk.engine.sent, counts, strict=True)
        ]
        desk.watch.on_engine_outputs(step(*outputs))
    assert desk.value("headrace_generation_tokens_total") == 9
    assert desk.value("headrace_inter_token_latency_seconds_count") == 6


@pytest.mark.parametrize("error", [AWAY, OUT_OF_MEMORY])
def test_a_request_whose_claim_fails_is_returned_and_the_worker_pauses_fetching(desk: Desk, error: Exception) -> None:
    desk.redis.error = error
    request = desk.accept(FakeCeleryRequest())
    assert request.fate == ["requeued"]
    assert desk.results == {}
    assert desk.admission.free_slots() == 0
    desk.redis.error = None
    desk.dispatcher.heartbeat()
    desk.assert_idle()


@pytest.mark.parametrize("delay", [timedelta(0), timedelta(seconds=3000)])
def test_a_message_over_its_tenants_quota_is_refused_and_costs_nothing(desk: Desk, delay: timedelta) -> None:
    request = desk.accept(FakeCeleryRequest(over_quota=7, due=datetime.now(UTC) + delay))
    desk.assert_idle()
    assert desk.results["r1"]["error"]["code"] == "quota_exceeded"
    assert "holds 7 requests" in desk.redis.end("r1")["error"]["message"]
    assert request.tokens == 0


def test_a_copy_over_the_quota_does_not_end_the_request_that_runs(desk: Desk) -> None:
    desk.accept(FakeCeleryRequest())
    desk.generate(13)
    desk.accept(FakeCeleryRequest(lease_id="l2", over_quota=7))
    desk.generate(14, finish=FinishReason.LENGTH)
    desk.assert_idle()
    assert desk.results["r1"]["error"] is None


def test_a_copy_over_the_quota_resumes_the_request_of_another_worker(desk: Desk) -> None:
    desk.redis.streams["headrace:stream:r1"] = [(1, 0, "start", {"worker": "another"})]
    desk.accept(FakeCeleryRequest(over_quota=7))
    desk.generate(13, finish=FinishReason.LENGTH)
    desk.assert_idle()
    assert desk.results["r1"]["error"] is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("structured_outputs: the grammar is too complex where the output is", "invalid_request"),
        ("no token is left that may follow: the request's rules forbid them all", "invalid_request"),
        ("the logits processor failed", "engine_error"),
    ],
)
def test_an_output_that_its_request_made_impossible_is_no_error_of_the_engine(
    desk: Desk, error: str, code: str
) -> None:
    desk.accept(FakeCeleryRequest())
    desk.generate(13)
    [request] = desk.engine.sent
    output = EngineCoreOutput(
        request_id=request.request_id, new_token_ids=[], finish_reason=FinishReason.ERROR, error=error
    )
    desk.watch.on_engine_outputs(step(output))
    desk.settle()
    assert desk.results["r1"]["error"] == {"code": code, "message": error}


def test_a_start_that_fails_halfway_is_answered_and_leaves_no_state(desk: Desk) -> None:
    desk.engine.send_error = RuntimeError("unforeseen")
    desk.accept(FakeCeleryRequest(expires=datetime.now(UTC) + timedelta(seconds=60)))
    desk.engine.send_error = None
    desk.assert_idle()
    assert desk.results["r1"]["error"]["code"] == "engine_error"
    assert "unforeseen" not in str(desk.results["r1"])
    assert desk.redis.end("r1")["error"]["code"] == "engine_error"


def test_a_start_whose_connection_fails_halfway_is_returned_and_leaves_no_state(desk: Desk) -> None:
    desk.engine.send_error = AWAY
    request = desk.accept(FakeCeleryRequest())
    assert request.fate == ["accepted", "requeued"]
    desk.dispatcher.heartbeat()
    desk.assert_idle()


@pytest.mark.parametrize(
    ("error", "fate"),
    [(redis.exceptions.NoPermissionError("setex"), "requeued"), (ValueError("a bug"), "let go")],
)
def test_a_message_whose_result_cannot_be_stored_is_delivered_again_and_counts_unless_the_server_is_at_fault(
    desk: Desk, error: Exception, fate: str
) -> None:
    class Unstorable(FakeCeleryRequest):
        def finish(self, result: dict[str, Any]) -> None:
            raise error

    request = desk.accept(Unstorable())
    desk.generate(13, finish=FinishReason.LENGTH)
    desk.settle()
    assert request.fate == ["accepted", fate]
    assert (desk.admission.free_slots() == 0) == (fate == "requeued")
    desk.dispatcher.heartbeat()
    desk.assert_idle()


def test_a_message_that_arrives_while_the_worker_drains_is_returned(desk: Desk) -> None:
    desk.dispatcher.drain("command")
    assert desk.admission.free_slots() == 0
    assert desk.accept(FakeCeleryRequest()).fate == ["requeued"]
    assert desk.redis.entries("r1") == []


def test_requests_of_a_dead_engine_are_sent_again_from_their_next_token(desk: Desk) -> None:
    desk.accept(FakeCeleryRequest())
    desk.generate(13)
    desk.watch.on_engine_lost("killed", "crash", was_ready=True)
    desk.engine.sent.clear()
    desk.watch.on_engine_ready(MODEL, CAPABILITIES)
    [sent] = desk.engine.sent
    assert sent.output_token_ids == [13]
    desk.generate(14, finish=FinishReason.LENGTH)
    desk.assert_idle()
    assert [entry[:3] for entry in desk.redis.entries("r1")] == [
        (1, 0, "start"),
        (1, 1, "chunk"),
        (1, 2, "chunk"),
        (1, 3, "end"),
    ]


def test_the_death_of_a_loading_engine_counts_against_no_request(desk: Desk) -> None:
    request = desk.accept(FakeCeleryRequest())
    for _ in range(9):
        desk.watch.on_engine_lost("no memory", "crash", was_ready=False)
    assert desk.results == {}
    desk.watch.on_engine_given_up("it died too often")
    assert desk.given_up == ["it died too often"]
    assert desk.admission.free_slots() == 0
    desk.dispatcher.requeue_all()
    assert request.fate == ["accepted", "requeued, counted"]


def test_requests_are_returned_last_first_and_a_drain_logs_how_many(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    order: list[str] = []
    for name in ("r1", "r2", "r3"):
        request = desk.accept(FakeCeleryRequest(name))
        request.requeue = lambda name=name, **_: order.append(name)  # type: ignore[method-assign, misc]
    caplog.set_level("INFO")
    desk.dispatcher.drain("command")
    assert "drain began reason=command running=3 unprepared=0" in caplog.text
    desk.dispatcher.requeue_all()
    desk.dispatcher.log_drained()
    assert "drain finished ended=0 requeued=3" in caplog.text
    assert order == ["r3", "r2", "r1"]
    assert len(desk.engine.aborted) == 3


def test_tokens_that_redis_did_not_take_are_written_at_the_next_heartbeat(desk: Desk) -> None:
    desk.accept(FakeCeleryRequest())
    desk.redis.error = AWAY
    desk.generate(13)
    desk.generate(14, finish=FinishReason.LENGTH)
    assert not desk.dispatcher.is_idle
    assert desk.results == {}
    desk.redis.error = None
    desk.dispatcher.heartbeat()
    desk.assert_idle()
    assert desk.text("r1") == "de"
    assert desk.results["r1"]["outputs"][0]["token_ids"] == [13, 14]


def test_if_redis_fails_a_refusal_no_message_is_taken_until_the_next_heartbeat(desk: Desk) -> None:
    desk.redis.error = AWAY
    request = desk.accept(FakeCeleryRequest(kwargs={"prompt": ""}))
    assert request.fate == ["requeued"]
    desk.redis.error = None
    assert desk.admission.free_slots() == 0
    desk.dispatcher.heartbeat()
    assert desk.admission.free_slots() == 4


def test_a_lost_lease_ends_the_request_and_its_late_outputs_are_ignored(desk: Desk) -> None:
    request = desk.accept(FakeCeleryRequest())
    old = list(desk.engine.sent)
    desk.generate(13)
    desk.admission.lease_lost(SimpleNamespace(headers={"id": "r1"}, delivery_tag="l1"))
    assert [request.request_id for request in old] == desk.engine.aborted
    again = desk.accept(FakeCeleryRequest(lease_id="l1"))
    late = EngineCoreOutput(request_id=old[0].request_id, new_token_ids=[14])
    desk.watch.on_engine_outputs(step(late))
    assert desk.text("r1") == "d"
    del desk.engine.sent[0]
    desk.generate(14, finish=FinishReason.LENGTH)
    desk.assert_idle()
    assert desk.text("r1") == "de"
    assert request.fate == ["accepted"]
    assert again.fate == ["accepted"]


def test_a_lost_lease_of_an_older_message_does_not_touch_the_one_that_replaced_it(desk: Desk) -> None:
    first = desk.accept(FakeCeleryRequest(lease_id="l1"))
    second = desk.accept(FakeCeleryRequest(lease_id="l2"))
    assert first.fate == ["accepted", "acknowledged"]
    desk.admission.lease_lost(SimpleNamespace(headers={"id": "r1"}, delivery_tag="l1"))
    assert len(desk.in_flight) == 1
    desk.generate(13, finish=FinishReason.LENGTH)
    desk.assert_idle()
    assert second.fate == ["accepted"]
    assert desk.value("headrace_requests_in_flight") == 0


def test_a_deadline_ends_a_request_and_a_late_timer_ends_nothing(desk: Desk) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=5)
    desk.accept(FakeCeleryRequest(expires=soon))
    desk.generate(13)
    expire = desk.hub.timers[0].callback
    desk.hub.advance()
    desk.assert_idle()
    assert desk.results["r1"]["error"]["code"] == "expired"
    assert desk.results["r1"]["outputs"][0]["token_ids"] == [13]
    desk.accept(FakeCeleryRequest())
    expire()
    assert desk.results["r1"]["error"]["code"] == "expired"


def test_a_fenced_request_is_left_to_its_new_worker(desk: Desk) -> None:
    request = desk.accept(FakeCeleryRequest())
    desk.redis.streams["headrace:stream:r1"].append((2, 0, "start", {"worker": "another"}))
    desk.generate(13)
    desk.assert_idle()
    assert desk.results == {}
    # If the lease was lost, requeueing does nothing. If not, another client than a worker wrote to the stream.
    assert request.fate == ["accepted", "requeued, counted"]


def test_no_slot_is_free_while_requests_wait_in_the_engine(desk: Desk) -> None:
    desk.accept(FakeCeleryRequest())
    desk.generate(13, waiting=1)
    assert desk.admission.free_slots() == 0
    desk.generate(14, waiting=0)
    assert desk.admission.free_slots() == 3
    desk.accept(FakeCeleryRequest("r2", {"prompt": "abc", "sampling_params": {"n": 2}}))
    assert desk.admission.free_slots() == 1
    desk.engine.is_ready = False
    assert desk.admission.free_slots() == 0


def test_terminating_an_unknown_request_does_nothing(desk: Desk) -> None:
    assert not desk.admission.terminate("r1")
    request = desk.accept(FakeCeleryRequest())
    assert desk.admission.terminate("r1")
    assert not desk.admission.terminate("r1")
    desk.assert_idle()
    assert request.fate == ["accepted", "revoked"]
    assert desk.redis.end("r1")["finish_reason"] == "cancelled"


def test_a_dead_letter_ends_its_stream_unless_it_has_ended(desk: Desk) -> None:
    body = b'{"headers": {"id": "r1"}}'
    desk.dispatcher.settlement.dead_letter(DeadLetter("delivery limit", "headrace.tiny", 5, body, bound_id="r1"))
    desk.assert_idle()
    assert desk.redis.end("r1")["error"]["code"] == "dead_letter"
    assert desk.results.pop("r1")["error"]["code"] == "dead_letter"
    desk.dispatcher.settlement.dead_letter(DeadLetter("rejected", "headrace.tiny", 1, body, bound_id="r1"))
    desk.dispatcher.settlement.dead_letter(DeadLetter("undecodable", "headrace.tiny", 1, b"[1]"))
    desk.assert_idle()
    assert desk.results == {}
    assert len(desk.redis.entries("r1")) == 1


@pytest.mark.parametrize("end", ["dead letter", "malformed"])
def test_the_end_of_a_message_that_never_ran_is_retried_while_redis_is_at_fault(desk: Desk, end: str) -> None:
    desk.redis.error = AWAY
    if end == "malformed":
        desk.dispatcher.settlement.refuse_malformed("r1", DeliveryInfo("content"))
    else:
        letter = DeadLetter("delivery limit", "headrace.tiny", 5, b'{"headers": {"id": "r1"}}', bound_id="r1")
        desk.dispatcher.settlement.dead_letter(letter)
    desk.dispatcher.heartbeat()
    assert desk.admission.free_slots() == 0
    assert not desk.dispatcher.is_idle
    desk.redis.error = None
    desk.dispatcher.heartbeat()
    desk.assert_idle()
    assert desk.redis.end("r1")["error"] == desk.results["r1"]["error"]
    assert desk.admission.free_slots() == 4


def test_an_end_that_its_own_stream_refuses_is_not_retried(desk: Desk) -> None:
    desk.redis.error, desk.redis.refuses_all = redis.ResponseError("WRONGTYPE"), False
    desk.dispatcher.settlement.refuse_malformed("r1", DeliveryInfo("content"))
    desk.assert_idle()
    assert desk.admission.free_slots() == 4


@pytest.fixture
def refused_end(desk: Desk) -> FakeCeleryRequest:
    """Complete the first attempt at r1 while Redis is away, so that its end is not written."""
    request = desk.accept(FakeCeleryRequest())
    desk.redis.error = AWAY
    desk.generate(13, finish=FinishReason.LENGTH)
    desk.redis.error = None
    desk.engine.sent.clear()
    return request


def test_a_request_redelivered_before_its_end_is_written_is_not_generated_again(
    desk: Desk, refused_end: FakeCeleryRequest
) -> None:
    again = desk.accept(FakeCeleryRequest())
    assert desk.engine.sent == []
    desk.dispatcher.heartbeat()
    desk.assert_idle()
    assert desk.text("r1") == "d"
    assert desk.results["r1"]["error"] is None
    assert "acknowledged" not in refused_end.fate  # both have one lease, which the result still needs
    assert again.fate == ["accepted"]


def test_the_refused_end_of_an_old_attempt_does_not_affect_the_next_one_in_the_same_worker(desk: Desk) -> None:
    desk.accept(FakeCeleryRequest())
    desk.generate(13)
    desk.redis.error = AWAY
    desk.admission.terminate("r1")  # its end is not written yet
    desk.redis.error = None
    desk.engine.sent.clear()
    desk.accept(FakeCeleryRequest(lease_id="l2"))
    desk.dispatcher.heartbeat()
    assert len(desk.in_flight) == 1
    desk.generate(14, finish=FinishReason.LENGTH)
    desk.settle()
    assert desk.text("r1") == "de"
    assert desk.results["r1"]["error"] is None


def test_a_message_before_its_eta_is_returned_to_redis_until_then(desk: Desk) -> None:
    later = desk.accept(FakeCeleryRequest(due=datetime.now(UTC) + timedelta(seconds=3000)))
    [fate] = later.fate
    assert fate in ("postponed by 2999 s", "postponed by 3000 s")
    assert desk.redis.entries("r1") == []
    desk.assert_idle()


def test_an_eta_too_far_ahead_is_refused(desk: Desk) -> None:
    desk.accept(FakeCeleryRequest(due=datetime.now(UTC) + timedelta(days=900)))
    desk.assert_idle()
    assert desk.results["r1"]["error"]["code"] == "invalid_request"
    assert "must be at most 3600 s ahead, got 777" in desk.results["r1"]["error"]["message"]
    assert desk.redis.end("r1")["finish_reason"] == "rejected"


def test_an_error_that_quotes_a_prompt_is_logged_without_its_text(
    desk: Desk, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.engine.send_error = RuntimeError("cannot work on Zanzibar")
    desk.accept(FakeCeleryRequest())
    desk.engine.send_error = None
    desk.assert_idle()
    logged = caplog.text + "".join(capsys.readouterr())
    assert "RuntimeError" in logged
    assert "Zanzibar" not in logged


def test_an_id_with_a_lone_surrogate_ends_no_stream_and_raises_nothing(desk: Desk) -> None:
    desk.dispatcher.settlement.refuse_malformed("\ud800", DeliveryInfo("content"))
    desk.assert_idle()
    assert desk.results == {}


GATHERING = {"prompt": "abc", "sampling_params": {"max_tokens": 40, "stream_interval": 10, "prompt_logprobs": 0}}


def test_tokens_held_back_when_the_engine_died_are_not_published_twice(desk: Desk) -> None:
    desk.accept(FakeCeleryRequest(kwargs=GATHERING))
    for token_id in (13, 14, 15):
        desk.generate(token_id)
    assert desk.text("r1") == "d"
    desk.engine.sent.clear()
    desk.watch.on_engine_lost("killed", "crash", was_ready=True)
    desk.watch.on_engine_ready(MODEL, CAPABILITIES)
    assert desk.engine.sent[0].output_token_ids == [13]
    desk.generate(14)
    desk.generate(15, finish=FinishReason.LENGTH)
    desk.assert_idle()
    assert desk.text("r1") == "def"
    assert desk.results["r1"]["outputs"][0]["token_ids"] == [13, 14, 15]


def test_a_deadline_publishes_gathered_tokens(desk: Desk) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=5)
    desk.accept(FakeCeleryRequest(kwargs=GATHERING, expires=soon))
    for token_id in (13, 14, 15):
        desk.generate(token_id)
    desk.hub.advance()
    desk.assert_idle()
    assert desk.text("r1") == "def"
    assert desk.redis.end("r1")["finish_reason"] == "expired"
    (output,) = desk.results["r1"]["outputs"]
    assert (output["text"], output["finish_reason"]) == ("def", None)


def test_prompt_logprobs_reach_stream_and_result_once_even_if_another_worker_resumes(desk: Desk) -> None:
    desk.accept(FakeCeleryRequest(kwargs=GATHERING))
    (sent,) = desk.engine.sent
    entries = [[(11, -1.5, 2)], [(12, -0.5, 1)]]
    first = EngineCoreOutput(request_id=sent.request_id, new_token_ids=[13], prompt_logprobs=entries)
    desk.watch.on_engine_outputs(step(first))
    desk.dispatcher.requeue_all()
    expected = [None, [[11, -1.5, 2, "b"]], [[12, -0.5, 1, "c"]]]
    other = Desk()
    other.redis.streams = desk.redis.streams
    other.accept(FakeCeleryRequest(kwargs=GATHERING))
    assert other.engine.sent[0].output_token_ids == [13]
    other.generate(14, finish=FinishReason.LENGTH)
    other.assert_idle()
    chunks = [data for _, _, kind, data in other.redis.entries("r1") if kind == "chunk"]
    assert [data.get("prompt_logprobs") for data in chunks] == [expected, None]
    assert other.results["r1"]["prompt_logprobs"] == expected
    assert other.results["r1"]["outputs"][0]["token_ids"] == [13, 14]


def test_extra_arguments_are_refused_by_name_unless_a_logits_processor_reads_them() -> None:
    kwargs = {"prompt": "abc", "sampling_params": {"max_tokens": 4, "extra_args": {"count_from": 3}}}
    desk = Desk(logits_processors=["engine.processors:CountUp"])
    desk.accept(FakeCeleryRequest(kwargs=kwargs))
    assert desk.engine.sent[0].sampling_params.extra_args == {"count_from": 3}
    other = Desk()
    other.accept(FakeCeleryRequest(kwargs=kwargs))
    other.settle()
    assert other.results["r1"]["error"] == {
        "code": "invalid_request",
        "message": "extra_args holds 'count_from', which no logits processor of this engine reads",
    }


def test_a_stream_deleted_under_a_running_request_is_marked_as_gone(desk: Desk) -> None:
    request = desk.accept(FakeCeleryRequest())
    desk.generate(13)
    del desk.redis.streams["headrace:stream:r1"]
    desk.generate(14)
    desk.assert_idle()
    assert desk.redis.values["headrace:ended:r1"] == "1"
    assert desk.redis.milliseconds_left["headrace:ended:r1"] == 1000 * (60 + 3600)
    assert desk.results["r1"]["error"]["code"] == "expired"
    assert request.fate == ["accepted"]
    assert desk.value("headrace_streams_gone_total") == 1


REFUSED = redis.ResponseError("the stream has exhausted the last possible ID")


def test_a_single_refused_stream_counts_against_its_request_and_blocks_no_other(desk: Desk) -> None:
    desk.redis.error, desk.redis.refuses_all = REFUSED, False
    request = desk.accept(FakeCeleryRequest())
    assert request.fate == ["requeued, counted"]
    assert desk.value("headrace_queue_returned_messages_total", reason="stream_refused") == 1
    desk.redis.error = None
    desk.assert_idle()


@pytest.mark.parametrize(
    ("error", "refuses_all"),
    [
        (REFUSED, True),
        (redis.exceptions.NoPermissionError("this user has no permissions to run the 'xadd' command"), False),
        (redis.ResponseError("ACL failure in script: User worker has no permissions to run the 'xadd' command"), False),
        (redis.ResponseError("MISCONF Errors writing to the AOF file"), False),
    ],
)
def test_a_server_at_fault_counts_against_no_request_and_is_reported(
    desk: Desk, error: Exception, refuses_all: bool
) -> None:
    reasons: list[str] = []
    desk.dispatcher.settlement.on_refused = reasons.append
    desk.redis.error, desk.redis.refuses_all = error, refuses_all
    request = desk.accept(FakeCeleryRequest())
    assert request.fate == ["requeued"]
    assert desk.admission.free_slots() == 0
    assert desk.value("headrace_queue_returned_messages_total", reason="redis") == 1
    assert reasons == [str(error)]


def test_a_stream_that_repeatedly_loses_entries_counts_against_its_request(desk: Desk) -> None:
    request = desk.accept(FakeCeleryRequest())
    desk.generate(13)
    desk.redis.streams["headrace:stream:r1"] = [(0, 0, "start", {"worker": "one that nobody knows"})]
    desk.generate(14)
    desk.assert_idle()
    assert request.fate == ["accepted", "requeued, counted"]
    assert desk.value("headrace_queue_returned_messages_total", reason="rolled_back") == 1


@pytest.mark.parametrize("sampling_params", [{"n": 2}, {"max_tokens": 0}])
def test_another_message_with_the_id_of_a_running_request_is_rejected(
    desk: Desk, sampling_params: dict[str, Any]
) -> None:
    request = desk.accept(FakeCeleryRequest())
    kwargs = {"prompt": "xyz", "sampling_params": sampling_params}
    other = desk.accept(FakeCeleryRequest("r1", kwargs, lease_id="l2", content="another"))
    desk.generate(13, finish=FinishReason.LENGTH)
    desk.assert_idle()
    assert (other.fate, request.fate) == (["rejected as duplicate"], ["accepted"])
    assert desk.results["r1"]["error"] is None


@pytest.mark.parametrize("is_over", [False, True], ids=["running elsewhere", "ended"])
@pytest.mark.parametrize("sampling_params", [{"n": 1}, {"max_tokens": 0}], ids=["valid", "invalid"])
def test_another_message_touches_neither_stream_nor_result_of_the_first(
    desk: Desk, sampling_params: dict[str, Any], is_over: bool
) -> None:
    desk.redis.streams["headrace:stream:r1"] = [(1, 0, "start", {"worker": "another", "content": "first"})]
    if is_over:
        desk.redis.streams["headrace:stream:r1"].append((1, 1, "end", {"finish_reason": "stop"}))
    before = list(desk.redis.entries("r1"))
    kwargs = {"prompt": "xyz", "sampling_params": sampling_params}
    other = desk.accept(FakeCeleryRequest("r1", kwargs, content="another"))
    letter = DeadLetter("undecodable", "headrace.tiny", 1, b'{"headers": {"id": "r1"}}')
    desk.dispatcher.settlement.dead_letter(letter)
    desk.dispatcher.settlement.dead_letter(replace(letter, bound_id="r1"))
    desk.dispatcher.settlement.refuse_malformed("r1", DeliveryInfo("another"))
    desk.assert_idle()
    assert other.fate == ["rejected as duplicate"]
    assert desk.redis.entries("r1") == before
    assert desk.results == {}
