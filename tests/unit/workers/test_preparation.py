"""Messages under preparation: their order, and events that end one."""

from __future__ import annotations

import threading
import time
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from headrace_broker.messages import TASK_NAME
from headrace_workers.engine_link.adapters import Adapters
from headrace_workers.preparation import preparation
from headrace_workers.preparation.file_lookups import FileLookups
from headrace_workers.preparation.process import QUICK_BODY_BYTES
from unit.workers.desk import Desk
from unit.workers.fakes import AWAY, CAPABILITIES, FakeCeleryRequest, FakeHub

GRAMMAR = {"prompt": "abc", "sampling_params": {"structured_outputs": {"choice": ["a", "b"]}}}


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def held(desk: Desk) -> Desk:
    """Prepare nothing until the test calls `answer`."""
    desk.quick.is_held = desk.slow.is_held = True
    return desk


def take(desk: Desk, request_id: str, kwargs: Any = None, **headers: Any) -> FakeCeleryRequest:
    return desk.accept(FakeCeleryRequest(request_id, kwargs, **headers))


def large(**more: Any) -> dict[str, Any]:
    return {"prompt": "a" * (QUICK_BODY_BYTES + 1), **more}


def sent(desk: Desk) -> list[str]:
    return [request.request_id.split(":")[0] for request in desk.engine.sent]


def test_messages_under_preparation_count_as_taken_and_claim_no_stream(held: Desk) -> None:
    take(held, "r1")
    assert held.admission.free_slots() == 3
    assert not held.dispatcher.is_idle
    assert held.redis.streams == {}
    held.quick.answer()
    assert held.admission.free_slots() == 3
    assert sent(held) == ["r1"]


def test_requests_reach_the_engine_in_the_order_in_which_they_were_fetched(held: Desk) -> None:
    for name in ("r1", "r2", "r3"):
        take(held, name)
    for _ in range(3):
        held.quick.answer()
    assert sent(held) == ["r1", "r2", "r3"]


def test_a_small_request_does_not_wait_for_a_large_one(desk: Desk) -> None:
    desk.slow.is_held = True
    take(desk, "slow", large())
    take(desk, "small")
    assert sent(desk) == ["small"]
    assert desk.admission.free_slots() == 2


def test_a_request_that_is_not_quick_goes_to_the_slow_process(desk: Desk) -> None:
    desk.slow.is_held = True
    take(desk, "r1", GRAMMAR)
    take(desk, "r2")
    assert sent(desk) == ["r2"]
    assert len(desk.slow.submitted) == 1


def test_a_refused_request_claims_no_stream_and_frees_its_slot(held: Desk) -> None:
    request = take(held, "r1")
    held.quick.answer("refused", "invalid_request", "the prompt is empty")
    held.settle()
    assert held.results["r1"]["error"] == {"code": "invalid_request", "message": "the prompt is empty"}
    assert [kind for _, _, kind, _ in held.redis.entries("r1")] == ["end"]
    assert request.tokens == 0
    held.assert_idle()


def test_a_body_that_cannot_be_decoded_is_rejected(desk: Desk) -> None:
    request = FakeCeleryRequest("r1")
    request.body = b"\xc1\xc1"
    desk.accept(request)
    assert request.fate == ["rejected"]
    desk.settle()
    assert desk.results["r1"]["error"]["code"] == "invalid_request"
    desk.assert_idle()


def test_an_unexpected_error_is_answered_without_its_text(held: Desk) -> None:
    take(held, "r1")
    held.quick.answer("failed", "ZeroDivisionError", ["somewhere"])
    held.settle()
    assert held.results["r1"]["error"] == {
        "code": "engine_error",
        "message": "the request could not be started: ZeroDivisionError",
    }


def test_tenants_take_turns_in_the_slow_process() -> None:
    desk = Desk(max_num_seqs=16)
    desk.slow.is_held = True
    for number in range(3):
        take(desk, f"a{number}", large(), tenant="a")
    take(desk, "b0", large(), tenant="b")
    order = []
    while desk.slow.submitted:
        order.append(next(iter(desk.slow.submitted.values()))[0])
        desk.slow.answer("refused", "invalid_request", "no")
    assert order == ["a0", "a1", "b0", "a2"]


@pytest.mark.parametrize("is_behind_another", [False, True])
def test_a_slow_request_that_cannot_be_sent_is_answered_and_the_next_continues(
    monkeypatch: pytest.MonkeyPatch, *, is_behind_another: bool
) -> None:
    desk = Desk(max_num_seqs=16)
    desk.slow.is_held = True
    submit = desk.slow.submit

    def send(number: int, values: list[Any]) -> None:
        if values[0] == "bad":
            raise UnicodeEncodeError("utf-8", "", 0, 0, "surrogates not allowed")
        submit(number, values)

    monkeypatch.setattr(desk.slow, "submit", send)
    names = ["first", "bad", "last"] if is_behind_another else ["bad", "first", "last"]
    for name in names:
        take(desk, name, large(), tenant=name)
    while desk.slow.submitted:
        desk.slow.answer("refused", "invalid_request", "no")
    desk.settle()
    assert {name: desk.results[name]["error"]["message"] for name in names} == {
        "first": "no",
        "bad": "the request could not be started: UnicodeEncodeError",
        "last": "no",
    }
    assert desk.dispatcher.is_idle


def test_slow_requests_leave_room_for_others() -> None:
    desk = Desk(max_num_seqs=16)
    desk.slow.is_held = True
    requests = [take(desk, f"a{number}", large(), tenant="a") for number in range(6)]
    assert [request.fate for request in requests] == [[], [], [], [], *([["postponed by 1 s at its place"]] * 2)]
    others = [take(desk, f"{name}{number}", large(), tenant=name) for name in "bc" for number in range(3)]
    assert [request.fate == [] for request in others] == [True, True, True, True, False, False]
    assert desk.admission.free_slots() == 8
    assert desk.value("headrace_queue_returned_messages_total", reason="not_ready") == 4


@pytest.mark.parametrize(
    ("process", "change", "reason"),
    [
        ("slow", {"is_failing": True}, "a preparation process fails at its start"),
        ("quick", {"is_ready": False}, "the preparation process is starting"),
    ],
)
def test_nothing_is_taken_until_the_preparation_processes_have_started(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, process: str, change: dict[str, bool], reason: str
) -> None:
    desk.dispatcher.heartbeat()
    assert (desk.admission.free_slots(), desk.dispatcher.stats()["state"]) == (4, "ready")
    for name, value in change.items():
        monkeypatch.setattr(getattr(desk, process), name, value)
    desk.dispatcher.heartbeat()
    assert desk.admission.free_slots() == 0
    assert f"requests cannot be prepared: {reason}" in desk.dispatcher.stats()["state"]
    monkeypatch.undo()
    desk.dispatcher.heartbeat()
    assert (desk.admission.free_slots(), desk.dispatcher.stats()["state"]) == (4, "ready")


def test_one_slot_can_hold_a_slow_request() -> None:
    desk = Desk(max_num_seqs=1)
    take(desk, "r1", {"prompt": "abc", "x" * QUICK_BODY_BYTES: 1})
    desk.settle()
    assert desk.results["r1"]["error"]["code"] == "invalid_request"


def test_draining_and_pausing_hand_back_messages_under_preparation_last_first(held: Desk) -> None:
    order: list[str] = []
    for name in ("r1", "r2"):
        request = take(held, name)
        request.requeue = lambda name=name, **_: order.append(name)  # type: ignore[method-assign]
    held.dispatcher.pause()
    assert order == ["r2", "r1"]
    held.dispatcher.resume()
    assert held.admission.free_slots() == 4
    third = take(held, "r3")
    held.dispatcher.drain("command")
    assert third.fate == ["requeued"]
    assert held.dispatcher.is_idle
    for _ in range(3):
        held.quick.answer()  # late: the message was requeued
    assert sent(held) == []


def test_a_lost_connection_drops_messages_under_preparation(held: Desk) -> None:
    take(held, "r1")
    held.dispatcher.attach(held.hub)
    held.quick.answer()
    assert sent(held) == []
    assert held.admission.free_slots() == 4


def test_a_lost_lease_ends_the_preparation(held: Desk) -> None:
    take(held, "r1", lease_id="old")
    other = FakeMessage("r1", "another")
    held.admission.lease_lost(other)
    assert held.admission.free_slots() == 3
    held.admission.lease_lost(FakeMessage("r1", "old"))
    assert held.admission.free_slots() == 4
    held.quick.answer()
    assert sent(held) == []


class FakeMessage:
    def __init__(self, request_id: str, lease_id: str) -> None:
        self.headers = {"id": request_id}
        self.delivery_tag = lease_id


def test_a_request_that_is_revoked_while_it_is_prepared_never_runs(held: Desk) -> None:
    terminated, revoked, expired = (take(held, name) for name in ("r1", "r2", "r3"))
    assert held.admission.terminate("r1")
    assert terminated.fate == ["terminated in the queue"]
    revoked.is_revoked = True
    held.quick.answer()
    held.quick.answer()
    assert revoked.fate == ["revoked in the queue"]
    expired.is_revoked = True
    held.dispatcher.heartbeat()
    assert expired.fate == ["revoked in the queue"]
    assert held.dispatcher.is_idle
    assert held.redis.streams == {}


def test_a_message_redelivered_under_preparation_continues_under_its_new_lease(held: Desk) -> None:
    old, new = take(held, "r1", lease_id="l1"), take(held, "r1", lease_id="l2")
    assert len(held.quick.submitted) == 1
    assert old.fate == ["acknowledged"]
    assert old.tokens == 0
    held.quick.answer()
    assert new.fate == ["accepted"]
    assert sent(held) == ["r1"]


def test_a_request_prepared_while_the_engine_is_dead_waits_for_the_next(held: Desk) -> None:
    take(held, "r1")
    held.engine.is_ready = False
    held.watch.on_engine_lost("boom", "crash", was_ready=True)
    held.quick.answer()
    held.engine.is_ready, held.engine.sent = True, []
    held.watch.on_engine_ready(held.watch.model_info, CAPABILITIES)
    assert sent(held) == ["r1"]


def test_a_claim_that_redis_refuses_hands_the_prepared_request_back(held: Desk) -> None:
    request = take(held, "r1")
    held.redis.error = AWAY
    held.quick.answer()
    assert request.fate == ["requeued"]
    assert held.admission.free_slots() == 0


def test_a_verdict_on_a_grammar_is_sent_to_the_quick_lane(desk: Desk) -> None:
    desk.slow.on_verdict("grammar", "it is empty")
    assert desk.quick.learned == {"grammar": "it is empty"}


def test_the_worker_ends_with_its_lanes(desk: Desk) -> None:
    desk.dispatcher.stop()
    assert desk.quick.is_closed
    assert desk.slow.is_closed


class HungAdapters(Adapters):
    """Adapters on a mount that answers when the test lets it."""

    def __init__(self, folder: Path) -> None:
        super().__init__({}, str(folder))
        self.answers = threading.Event()

    def find(self, name: str) -> Any:
        if name == "hung":
            assert self.answers.wait(30)
        return super().find(name)


def test_an_adapter_on_a_hung_mount_delays_no_other_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("good", "hung"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    adapters = HungAdapters(tmp_path)
    desk = Desk(adapters=adapters)
    take(desk, "r1", {"prompt": "abc", "lora": "hung"})
    take(desk, "r2", {"prompt": "abc", "lora": "good"})
    take(desk, "r3")
    assert sent(desk) == ["r3"]
    desk.wait_soon()
    assert sent(desk) == ["r3", "r2"]
    assert desk.admission.free_slots() == 1
    monkeypatch.setattr(preparation, "ADAPTER_SECONDS", 0.0)
    desk.dispatcher.heartbeat()
    desk.settle()
    error = desk.results["r1"]["error"]
    assert error["code"] == "engine_error"
    assert "LoRA adapter 'hung' could not be read within" in error["message"]
    adapters.answers.set()
    desk.wait_soon()
    assert sent(desk) == ["r3", "r2"]


def test_requests_for_an_adapter_that_is_known_to_hang_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = HungAdapters(tmp_path)
    desk = Desk(adapters=adapters)
    take(desk, "r1", {"prompt": "abc", "lora": "hung"})
    assert desk.admission.free_slots() < 4
    monkeypatch.setattr(preparation, "ADAPTER_SECONDS", 0.0)
    desk.dispatcher.heartbeat()
    take(desk, "r2", {"prompt": "abc", "lora": "hung"})
    desk.settle()
    assert desk.results["r2"]["error"]["message"] == "the folders of LoRA adapters cannot be read at the moment"
    assert desk.admission.free_slots() == 4
    adapters.answers.set()
    desk.wait_soon()
    take(desk, "r3", {"prompt": "abc", "lora": "hung"})
    desk.wait_soon()
    desk.settle()
    assert desk.results["r3"]["error"]["message"] == "tiny has no LoRA adapter named 'hung'"


def test_lookups_that_hang_are_bounded_in_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_workers.preparation.file_lookups.MAX_LOOKUPS", 1)
    adapters = HungAdapters(tmp_path)
    desk = Desk(adapters=adapters)
    for name in ("r1", "r2"):
        take(desk, name, {"prompt": "abc", "lora": "hung"})
    take(desk, "r3", {"prompt": "abc", "lora": "good"})
    desk.settle()
    assert desk.results["r3"]["error"]["message"] == "the folders of LoRA adapters cannot be read at the moment"
    adapters.answers.set()
    desk.wait_soon()
    desk.settle()
    for name in ("r1", "r2"):
        assert desk.results[name]["error"]["message"] == "tiny has no LoRA adapter named 'hung'"


def test_repeated_lookups_of_a_hung_adapter_leave_no_state() -> None:
    answers: list[str] = []
    lookups, hub, may_answer = FileLookups(), FakeHub(), threading.Event()
    lookups.attach(hub)

    def ask() -> str:
        assert may_answer.wait(30)
        return "found"

    def answer(found: str) -> None:
        answers.append(found)

    again = partial(answer)
    kept = weakref.ref(again)
    assert lookups.submit("hung", ask, answer, longest=30)
    assert lookups.submit("hung", ask, again, longest=30)
    del again
    assert kept() is None
    may_answer.set()
    deadline = time.monotonic() + 60
    while not hub.soon:
        assert time.monotonic() < deadline
    hub.run_soon()
    assert answers == ["found"]


def test_an_adapter_is_looked_up_again_after_no_thread_could_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise RuntimeError("can't start new thread")

    desk = Desk(adapters=Adapters({}, str(tmp_path)))
    with monkeypatch.context() as patched:
        patched.setattr("headrace_workers.preparation.file_lookups.threading", SimpleNamespace(Thread=refuse))
        take(desk, "r1", {"prompt": "abc", "lora": "nosuch"})
    take(desk, "r2", {"prompt": "abc", "lora": "nosuch"})
    desk.wait_soon()
    desk.settle()
    assert [desk.results[name]["error"]["message"] for name in ("r1", "r2")] == [
        "the folders of LoRA adapters cannot be read at the moment",
        "tiny has no LoRA adapter named 'nosuch'",
    ]


@pytest.mark.parametrize(("share", "salts"), [(False, ["1 a-", "1 b-", ""]), (True, ["", "", ""])])
def test_tenants_share_the_prefix_cache_only_if_the_setting_says_so(share: bool, salts: list[str]) -> None:
    desk = Desk(share_prefix_cache=share)
    for request_id, headers in (("r1", {"tenant": "a"}), ("r2", {"tenant": "b"}), ("r3", {})):
        take(desk, request_id, **headers)
    assert [request.cache_salt for request in desk.engine.sent] == salts


def test_a_large_body_is_not_decoded_on_the_event_loop(held: Desk) -> None:
    request = FakeCeleryRequest("r1")
    request.body = msgpack.packb([[], {"x": [{}] * 100_000}, {}])
    held.accept(request)
    (values,) = held.slow.submitted.values()
    assert values == ["r1", "application/x-msgpack", request.body, TASK_NAME]
