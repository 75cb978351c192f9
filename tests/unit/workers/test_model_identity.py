"""A stream begun with other weights is not continued silently."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace_broker.models.identity import ModelIdentity
from headrace_broker.streams.events import ChunkEvent, StartEvent
from headrace_broker.streams.writer import begun_with
from headrace_engine.requests.request import FinishReason
from unit.workers.desk import Desk
from unit.workers.fakes import CAPABILITIES, MODEL, FakeCeleryRequest

NOW = {"model": "tiny", "weights": "aa"}
BEFORE = {"model": "tiny", "weights": "bb"}


def start(attempt: int, **data: Any) -> tuple[int, int, str, dict[str, Any]]:
    return attempt, 0, "start", {"worker": "w", **data}


def chunk(attempt: int, offset: int) -> tuple[int, int, str, dict[str, Any]]:
    return attempt, offset, "chunk", {"index": 0, "token_ids": [13], "text": "d", "logprobs": None}


def desk_with(*entries: tuple[int, int, str, dict[str, Any]], weights: str = "aa") -> Desk:
    desk = Desk()
    desk.watch.model_info = replace(MODEL, weights=weights)
    desk.redis.streams["headrace:stream:r1"] = list(entries)
    return desk


def test_a_start_names_the_weights_that_compute_the_request() -> None:
    desk = desk_with()
    desk.accept(FakeCeleryRequest())
    [(_, _, kind, data)] = desk.redis.entries("r1")
    assert (kind, data["model"], data["weights"], "lora" in data) == ("start", "tiny", "aa", False)


def test_a_request_begun_with_other_weights_ends_with_its_tokens_and_an_error() -> None:
    desk = desk_with(start(1, **BEFORE), chunk(1, 1), chunk(1, 2))
    request = desk.accept(FakeCeleryRequest())
    desk.assert_idle()
    end, result = desk.redis.end("r1"), desk.results["r1"]
    assert (end["finish_reason"], end["error"]["code"]) == ("error", "model_changed")
    assert "began with tiny (weights bb), and this worker serves tiny (weights aa)" in end["error"]["message"]
    assert end["usage"]["completion_tokens"] == 2
    assert result["error"] == end["error"]
    assert result["outputs"][0]["text"] == "dd"
    assert request.fate == ["accepted"]
    assert desk.engine.sent == []
    assert desk.value("headrace_requests_total", outcome="error") == 1


@pytest.mark.parametrize(
    "earlier",
    [
        [start(1, **NOW), chunk(1, 1)],
        [start(1), chunk(1, 1)],  # of an older worker, which does not name its weights
        [start(1, model="tiny"), chunk(1, 1)],
        [start(1, model=3, weights=["x"]), chunk(1, 1)],
        [start(1, **BEFORE)],  # without a token there is nothing to resume
        [start(1, **NOW), chunk(1, 1), start(2, **BEFORE)],
        [start(1, model="another name", weights="aa"), chunk(1, 1)],
    ],
)
def test_requests_without_tokens_of_other_weights_continue(earlier: list[Any]) -> None:
    desk = desk_with(*earlier)
    desk.accept(FakeCeleryRequest())
    desk.generate(14, finish=FinishReason.LENGTH)
    desk.assert_idle()
    assert desk.redis.end("r1")["finish_reason"] == "length"


def test_a_worker_that_does_not_know_its_weights_continues_requests() -> None:
    desk = desk_with(start(1, **BEFORE), chunk(1, 1), weights="")
    desk.accept(FakeCeleryRequest())
    assert len(desk.engine.sent) == 1


def test_a_complete_request_needs_no_model() -> None:
    last = (1, 1, "chunk", {"index": 0, "token_ids": [13], "text": "d", "logprobs": None, "finish_reason": "stop"})
    desk = desk_with(start(1, **BEFORE), last)
    desk.accept(FakeCeleryRequest())
    desk.assert_idle()
    assert desk.redis.end("r1")["finish_reason"] == "stop"


def test_another_adapter_under_the_same_name_is_another_model() -> None:
    def events(lora: str) -> list[Any]:
        model = ModelIdentity("tiny", "aa", lora)
        return [StartEvent("1-0", 1, "w", model=model), ChunkEvent("1-1", 1, 1, 0, [7], "x")]

    serves = ModelIdentity("tiny", "aa", "l1")
    assert begun_with(events("l1"), serves) is None
    assert begun_with(events("l2"), serves) == ModelIdentity("tiny", "aa", "l2")
    assert "adapter l2" in str(begun_with(events("l2"), serves))


def test_an_engine_restarted_with_other_weights_resumes_nothing_and_ends_the_worker() -> None:
    desk = Desk()
    desk.watch.on_engine_ready(replace(MODEL, weights="aa"), CAPABILITIES)
    desk.watch.on_engine_ready(replace(MODEL, weights="aa"), CAPABILITIES)
    assert desk.given_up == []
    request = desk.accept(FakeCeleryRequest())
    desk.generate(13)
    desk.watch.on_engine_lost("killed", "crash", was_ready=True)
    desk.engine.sent.clear()
    desk.watch.on_engine_ready(replace(MODEL, weights="bb"), CAPABILITIES)
    assert desk.engine.sent == []
    assert request.fate == ["accepted", "requeued"]
    assert "loaded weights bb after aa" in desk.given_up[0]
    assert desk.admission.free_slots() == 0
