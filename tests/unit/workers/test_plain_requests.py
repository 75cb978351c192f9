"""Small plain requests are prepared without another process."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import msgpack
import pytest

from headrace_broker.messages import TASK_NAME
from headrace_engine.api.input_processor import InputProcessor
from headrace_workers.preparation.intake import Intake
from headrace_workers.preparation.plain_requests import PlainRequests
from unit.workers.desk import Desk
from unit.workers.fakes import MODEL, FakeCeleryRequest, FakeTokenizer


class CountingTokenizer(FakeTokenizer):
    encoded = 0

    def encode(self, text: str) -> list[int]:
        self.encoded += 1
        return super().encode(text)


def prepare(kwargs: Any, body: bytes | None = None, tokenizer: FakeTokenizer | None = None) -> Any:
    processor = InputProcessor(MODEL, tokenizer or FakeTokenizer())  # type: ignore[arg-type]
    packed = body if body is not None else msgpack.packb([[], kwargs, {}])
    return PlainRequests(Intake(processor, ["tiny"])).prepare("r1", "application/x-msgpack", packed, TASK_NAME)


@pytest.fixture
def desk() -> Desk:
    desk = Desk(prepares_plain_requests=True)
    desk.quick.is_held = True
    return desk


def sent(desk: Desk) -> list[str]:
    return [request.request_id.split(":")[0] for request in desk.engine.sent]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"prompt": "abc"},
        {"prompt": "a" * 12, "model": "tiny", "lora": None},
        {"prompt_token_ids": [11, 12, 13], "sampling_params": None},
        {"prompt": "abc", "sampling_params": {"n": 3, "temperature": 0.5, "seed": 7, "ignore_eos": True}},
        {"prompt": "abc", "sampling_params": {"stop": ["b", "c"], "stop_token_ids": [11], "logprobs": 2}},
    ],
    ids=str,
)
def test_a_plain_request_is_prepared_as_in_a_process(kwargs: Any) -> None:
    desk = Desk()
    answer = desk.quick.preparer.answer("r1", "application/x-msgpack", msgpack.packb([[], kwargs, {}]), TASK_NAME)
    assert ["prepared", asdict(prepare(kwargs))] == answer


@pytest.mark.parametrize(
    "kwargs",
    [
        {"messages": [{"role": "user", "content": "abc"}]},
        {"prompt": "a" * 1001},
        {"prompt": "abc", "sampling_params": {"bad_words": ["b"]}},
        {"prompt": "abc", "sampling_params": {"structured_outputs": {"choice": ["a", "b"]}}},
        {"prompt": "abc", "sampling_params": {"logit_bias": {"11": 1.0}}},
        {"prompt": "abc", "sampling_params": {"extra_args": {"a": 1}}},
        {"prompt": "abc", "sampling_params": {"allowed_token_ids": [11, 12]}},
        {"prompt_token_ids": [1000] * 2000},
        {"prompt": "abc", "anything": 1},
    ],
    ids=lambda kwargs: str(kwargs)[:60],
)
def test_a_request_that_may_take_longer_goes_to_a_process_untokenised(kwargs: Any) -> None:
    tokenizer = CountingTokenizer()
    assert prepare(kwargs, tokenizer=tokenizer) is None
    assert tokenizer.encoded == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1\xc1",
        msgpack.packb(None),
        msgpack.packb([[], None, {}]),
        msgpack.packb([[], {}]),
        msgpack.packb([[], {"prompt": "abc", "sampling_params": 3}, {}]),
        msgpack.packb([[], {"prompt": "abc", 3: 4}, {}]),
        msgpack.packb([["abc"], {"prompt": "abc"}, {}]),
        msgpack.packb([[], {"prompt": "abc", "sampling_params": {"temperature": -1}}, {}]),
        msgpack.packb([[], {"prompt": ""}, {}]),
        msgpack.packb([[], {"prompt": "abc", "model": "other"}, {}]),
        json.dumps([[], {"prompt": "abc"}, {}]).encode(),
    ],
    ids=repr,
)
def test_a_request_that_cannot_be_served_goes_to_a_process(body: bytes) -> None:
    assert prepare(None, body=body) is None


def test_a_plain_request_does_not_wait_for_a_process(desk: Desk) -> None:
    desk.accept(FakeCeleryRequest("r1"))
    assert sent(desk) == ["r1"]
    assert desk.quick.submitted == {}


def test_a_plain_request_does_not_overtake_one_that_a_process_prepares(desk: Desk) -> None:
    listed = {"prompt": "abc", "sampling_params": {"allowed_token_ids": [11, 12]}}
    desk.accept(FakeCeleryRequest("r1", listed))
    desk.accept(FakeCeleryRequest("r2"))
    assert sent(desk) == []
    desk.quick.answer()
    desk.quick.answer()
    assert sent(desk) == ["r1", "r2"]


def test_a_plain_request_overtakes_a_slow_one(desk: Desk) -> None:
    desk.slow.is_held = True
    desk.accept(FakeCeleryRequest("r1", {"prompt": "a" * 40_000}))
    desk.accept(FakeCeleryRequest("r2"))
    assert sent(desk) == ["r2"]


def test_a_plain_request_that_is_refused_gets_its_answer(desk: Desk) -> None:
    desk.quick.is_held = False
    desk.accept(FakeCeleryRequest("r1", {"prompt": ""}))
    desk.settle()
    assert desk.results["r1"]["error"]["code"] == "invalid_request"
    desk.assert_idle()


def test_a_worker_with_logits_processors_prepares_nothing_on_its_event_loop() -> None:
    assert Desk(logits_processors=["engine.processors:CountUp"]).plain is None
