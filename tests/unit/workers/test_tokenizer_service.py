"""Tokenizer calls inside a worker: beside the messages, one at a time, and each with an answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import redis

from headrace_broker.client.tokenizer_calls import TokenizerCall
from headrace_broker.packing import pack, unpack
from headrace_engine.api.input_processor import InputProcessor
from headrace_engine.text.tokenizer import ModelTokenizer, NoTokenizer
from headrace_workers.preparation.process import QUICK_BODY_BYTES
from headrace_workers.preparation.tokenizer_answers import TokenizerAnswers
from headrace_workers.preparation.tokenizer_service import TokenizerService
from unit.engine.letters import load_tokenizer
from unit.workers.desk import Desk
from unit.workers.fakes import AWAY, MODEL, FakeCeleryRequest, FakeHub

CALL = TokenizerCall("1", "count", pack({"request": {"prompt": "abc"}}))


@pytest.fixture
def answers() -> TokenizerAnswers:
    tokenizer = ModelTokenizer(load_tokenizer(None))
    return TokenizerAnswers(InputProcessor(MODEL, tokenizer), tokenizer)


def ask(answers: TokenizerAnswers, kind: str, **body: Any) -> dict[str, Any]:
    return unpack(answers.answer(kind, pack(body)))


def test_tokens_have_their_texts_and_are_decoded_to_the_same_text(answers: TokenizerAnswers) -> None:
    result = ask(answers, "tokenize", request={"prompt": "abc"}, token_strs=True)["result"]
    assert result["token_strs"] == ["a", "b", "c"]
    assert (result["count"], result["max_model_len"]) == (3, MODEL.max_model_len)
    assert ask(answers, "count", request={"prompt": "abc"})["result"] == {
        "count": 3,
        "max_model_len": MODEL.max_model_len,
    }
    assert ask(answers, "detokenize", tokens=result["tokens"])["result"] == {"prompt": "abc"}


@pytest.mark.parametrize(
    ("kind", "body", "named"),
    [
        ("count", {}, "exactly one of prompt"),
        ("count", {"request": {"prompt": 3}}, "prompt must be a string"),
        ("count", {"request": {"messages": [{"role": "user", "content": "a"}]}}, "no chat template"),
        ("count", {"request": 7}, "must be a map"),
        ("detokenize", {"tokens": "abc"}, "tokens must be a list"),
        ("detokenize", {"tokens": [100]}, "tokens must be below 100"),
    ],
)
def test_an_invalid_call_is_refused(answers: TokenizerAnswers, kind: str, body: dict[str, Any], named: str) -> None:
    error = ask(answers, kind, **body)["error"]
    assert (error["code"], named in error["message"]) == ("invalid_request", True), error


def test_an_unexpected_error_is_answered_without_text_of_the_call() -> None:
    class Broken(ModelTokenizer):
        def encode(self, text: str) -> list[int]:
            raise ZeroDivisionError(text)

    tokenizer = Broken(load_tokenizer(None))
    error = ask(TokenizerAnswers(InputProcessor(MODEL, tokenizer), tokenizer), "count", request={"prompt": "secret"})
    assert error["error"]["code"] == "engine_error"
    assert "ZeroDivisionError" in error["error"]["message"]
    assert "secret" not in error["error"]["message"]


def test_a_worker_without_a_tokenizer_refuses_by_name() -> None:
    tokenizer = NoTokenizer()
    error = ask(TokenizerAnswers(InputProcessor(MODEL, tokenizer), tokenizer), "count", request={"prompt": "a"})
    assert "skip_tokenizer_init" in error["error"]["message"]


def answered(desk: Desk, body: bytes = CALL.body) -> list[bytes]:
    found: list[bytes] = []
    desk.admission.answer_call("count", body, found.append)
    return found


def test_a_call_takes_no_slot_and_is_answered_while_all_slots_are_taken() -> None:
    desk = Desk()
    while desk.admission.free_slots():
        desk.accept(FakeCeleryRequest(f"r{desk.admission.free_slots()}"))
    (answer,) = answered(desk)
    assert unpack(answer)["result"]["count"] == 3
    assert desk.admission.free_slots() == 0


def test_slow_calls_take_turns_with_slow_messages() -> None:
    desk = Desk(max_num_seqs=16)
    desk.slow.is_held = True
    large = pack({"request": {"prompt": "a" * (QUICK_BODY_BYTES + 1)}})
    found = [answered(desk, large) for _ in range(3)]
    desk.accept(FakeCeleryRequest("r1", {"prompt": "a" * (QUICK_BODY_BYTES + 1)}))
    assert len(desk.slow.submitted) == 1
    order = []
    while desk.slow.submitted:
        order.append(next(iter(desk.slow.submitted.values()))[0])
        is_call = next(iter(desk.slow.submitted)) < 0
        desk.slow.answer(*(("answered", b"x") if is_call else ("refused", "invalid_request", "no")))
    assert order == ["count", "count", "r1", "count"]
    assert found == [[b"x"]] * 3


def test_a_call_in_progress_changes_neither_free_slots_nor_idleness() -> None:
    desk = Desk()
    desk.quick.is_held = True
    free_slots = desk.admission.free_slots()
    found = answered(desk)
    assert (desk.admission.free_slots(), desk.dispatcher.is_idle, found) == (free_slots, True, [])
    desk.quick.answer()
    assert unpack(found[0])["result"]["count"] == 3


def test_a_call_that_is_not_quick_moves_to_the_slow_process() -> None:
    desk = Desk()
    desk.quick.is_held = True
    found = answered(desk)
    desk.quick.answer("slow")
    assert unpack(found[0])["result"]["count"] == 3
    assert unpack(answered(desk, CALL.body + b" " * QUICK_BODY_BYTES)[0])["error"]  # neither a map nor quick
    assert not desk.quick.submitted


def test_a_call_whose_process_died_is_refused_with_the_reason() -> None:
    desk = Desk()
    desk.quick.is_held = True
    found = answered(desk)
    desk.quick.answer("refused", "invalid_request", "it takes too long")
    assert unpack(found[0])["error"] == {"code": "invalid_request", "message": "it takes too long"}


class FakeCalls:
    """Stands for Redis: gives or raises each of `given` in order, then gives nothing."""

    def __init__(self, *given: Any) -> None:
        self._given = list(given)
        self.sent: SimpleQueue[tuple[str, bytes]] = SimpleQueue()
        self.is_empty = threading.Event()
        self.takes = 0

    def take(self, seconds: float) -> TokenizerCall | None:
        self.takes += 1
        if not self._given:
            self.is_empty.set()
            threading.Event().wait(0.01)
            return None
        given = self._given.pop(0)
        if isinstance(given, Exception):
            raise given
        return given

    def answer(self, call: TokenizerCall, answer: bytes) -> None:
        self.sent.put((call.id, answer))


def serving(calls: Any, answer: Callable[..., None], *, is_open: bool = True) -> tuple[TokenizerService, Any]:
    """Start a service whose event loop the test turns."""
    service, hub = TokenizerService(calls, answer, lambda: is_open), FakeHub()
    service.attach(hub)
    service.start()
    return service, hub


def turn(hub: Any) -> None:
    (on_readable,) = hub.readers.values()
    on_readable()


def test_calls_are_answered_on_the_event_loop_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_workers.preparation.tokenizer_service.PAUSE_SECONDS", 0.01)
    taken: list[Any] = []
    calls = FakeCalls(CALL, redis.ConnectionError("away"), ValueError("odd"), None, TokenizerCall("2", "count", b""))
    service, hub = serving(calls, lambda kind, body, answered: taken.append((kind, body, answered)))
    try:
        turn(hub)  # the read blocks until there is a call
        kind, body, done = taken.pop()
        assert (kind, body, calls.takes) == ("count", CALL.body, 1)  # one at a time
        done(b"first")
        assert calls.sent.get(timeout=60) == ("1", b"first")
        turn(hub)
        taken.pop()[2](b"second")
        assert calls.sent.get(timeout=60) == ("2", b"second")
    finally:
        service.stop()


def test_a_draining_worker_takes_no_call_and_a_stopping_one_does_not_wait_for_one() -> None:
    calls = FakeCalls(CALL)
    service, _ = serving(calls, lambda *_: None, is_open=False)
    service.stop()
    service._thread.join(60)
    assert (service._thread.is_alive(), calls.takes) == (False, 0)
    service, hub = serving(FakeCalls(CALL), lambda *_: None)
    turn(hub)
    service.stop()
    service._thread.join(60)
    assert not service._thread.is_alive()


def test_the_dispatcher_takes_calls_unless_paused_or_drained_even_while_redis_refuses() -> None:
    desk = Desk()
    desk.redis.error = AWAY
    assert desk.admission.answers_calls
    desk.dispatcher.pause()
    assert not desk.admission.answers_calls
    desk.dispatcher.resume()
    assert desk.admission.answers_calls
    desk.dispatcher.drain("command")
    assert not desk.admission.answers_calls
