"""The operator's own logits processors: named by path, asked for by requests, and no danger to others."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import processors
from headrace_engine import LLMEngine, RequestOutput, SamplingParams
from headrace_engine.errors import ConfigError, InvalidRequestError

pytestmark = pytest.mark.rotated(
    "engine/headrace_engine/runner/sampling", "engine/headrace_engine/api", "engine/headrace_engine/requests"
)

MakeEngine = Callable[..., LLMEngine]
ALL = ["engine.processors:OnlyEven", processors.CountUp, "engine.processors:Fails"]


def run(engine: LLMEngine, *requests: dict[str, Any], prompt: list[int] | None = None) -> list[RequestOutput]:
    for number, params in enumerate(requests):
        ways = {"max_tokens": 12, "ignore_eos": True, "seed": number, **params}
        engine.add_request(str(number), prompt or [5, 6, 7], SamplingParams(**ways))
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output
    return [last[str(number)] for number in range(len(requests))]


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def test_a_request_reaches_a_processor_by_its_arguments_and_leaves_its_batch_mates_alone(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(logits_processors=ALL)
    plain, even, count = run(engine, {}, {"extra_args": {"only_even": True}}, {"extra_args": {"count_from": 40}})
    assert all(token % 2 == 0 for token in tokens(even))
    assert tokens(count) == list(range(43, 55))
    assert tokens(plain) == tokens(run(make_engine(), {})[0])
    assert any(token % 2 for token in tokens(plain))


def test_they_work_in_a_child_process(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = str(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH", "")])))
    engine = make_engine(logits_processors=ALL, core_in_process=False)
    (count,) = run(engine, {"extra_args": {"count_from": 40}, "temperature": 0})
    assert tokens(count) == list(range(43, 55))


def test_several_apply_in_their_order_and_with_penalties(make_engine: MakeEngine) -> None:
    engine = make_engine(logits_processors=ALL)
    both = {"count_from": 40, "only_even": True}
    # Forced after the odd ones are forbidden: the last word has the later one.
    (found,) = run(engine, {"extra_args": both, "presence_penalty": 1.0, "repetition_penalty": 1.5, "temperature": 0.7})
    assert tokens(found) == list(range(43, 55))


def test_a_preempted_request_goes_on_where_it_was(make_engine: MakeEngine) -> None:
    engine = make_engine(logits_processors=ALL, num_blocks=10, max_model_len=128)
    wanted = {"extra_args": {"count_from": 60}, "max_tokens": 50}
    for output in run(engine, wanted, wanted, wanted, prompt=[5] * 40):
        assert tokens(output) == list(range(100, 150))


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("early", "logits processor Fails failed: RuntimeError: no processor for 0"),
        ("late", "logits processor Fails failed: ZeroDivisionError: division by zero"),
        ("shape", "logits processor Fails failed: TypeError: returned shape (3,), expected logits of shape (384,)"),
    ],
)
def test_one_that_fails_ends_its_request_alone(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture, how: str, sentence: str
) -> None:
    engine = make_engine(logits_processors=ALL)
    with caplog.at_level(logging.ERROR):
        failed, plain = run(engine, {"extra_args": {"fail": how}}, {})
    assert (failed.outputs[0].finish_reason, failed.error) == ("error", sentence)
    assert len(tokens(plain)) == 12
    assert "logits processor Fails failed" in caplog.text
    assert "no processor for 0" not in caplog.text  # a message may hold a user's text


def test_arguments_are_checked_at_the_door(make_engine: MakeEngine) -> None:
    engine = make_engine(logits_processors=ALL)
    with pytest.raises(InvalidRequestError) as refused:
        run(engine, {"extra_args": {"only_odd": True, "only_even": True}})
    assert refused.value.problems == ["extra_args holds 'only_odd', which no logits processor of this engine reads"]
    with pytest.raises(InvalidRequestError, match="OnlyEven refuses: only_even must be true or false"):
        run(engine, {"extra_args": {"only_even": 1}})


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("engine.processors:Missing", "cannot be imported"),
        ("no_such_module:Thing", "cannot be imported"),
        ("engine.processors", "cannot be imported"),
        ("engine.processors:NotAProcessor", "is not a subclass of headrace_engine.LogitsProcessor"),
        ("headrace_engine:LogitsProcessor", "does not define new_req_logits_processor"),
    ],
)
def test_a_path_that_leads_to_no_processor_is_refused_by_name(make_engine: MakeEngine, path: str, part: str) -> None:
    with pytest.raises(ConfigError, match=f"logits processor '{path}'") as refused:
        make_engine(logits_processors=[path])
    assert part in str(refused.value)
