"""Arguments of odd types and values are accepted, or refused with an error of ours."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.tiny_models import TinyModel
from headrace_engine import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    BeamSearchParams,
    EngineArgs,
    LoRARequest,
    SamplingParams,
    StructuredOutputsParams,
)
from headrace_engine.errors import HeadraceEngineError
from headrace_engine.text.chat import ChatOptions

pytestmark = pytest.mark.rotated("engine/headrace_engine/api", "engine/headrace_engine/requests")

ODD_VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    2**63,
    -(2**70),
    10**5000,
    0.5,
    float("nan"),
    float("inf"),
    1j,
    "",
    "a",
    "\ud800",
    "\0",
    "x" * 3000,
    b"a",
    (),
    [],
    [1, "a"],
    [[1], [2]],
    [None],
    [{}],
    {},
    {"a": 1},
    {1: 2},
    {"prompt": "a"},
    {"role": "user", "content": "a"},
    {"prompt_token_ids": [1], "prompt": 5},
    {1, 2},
    range(3),
    iter([1]),
    object(),
    object,
    len,
    uuid.UUID(int=1),
    np.int64(1),
    np.float32(0.5),
    np.bool_(True),
    np.array([1, 2]),
    np.array([[1.5]]),
    np.array(None),
    np.datetime64("2026-01-01"),
    torch.tensor([1]),
    torch.tensor(1.5),
    SamplingParams(max_tokens=1),
    LoRARequest("a", 1, "/nowhere"),
]
ODD = st.sampled_from(ODD_VALUES)
FEW = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
NAMES = [field for field in SamplingParams.__slots__ if field != "max_tokens"]


@pytest.fixture(scope="module")
def llm(llama: TinyModel) -> Iterator[LLM]:
    made = LLM(llama.folder, dtype="float32", num_blocks=80, block_size=16)
    yield made
    made.close()


def answered(call: Callable[[], Any]) -> None:
    with contextlib.suppress(HeadraceEngineError):
        call()


def settled(llm: LLM) -> None:
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


@FEW
@given(st.dictionaries(st.sampled_from(NAMES), ODD, max_size=3))
def test_odd_sampling_parameters_are_accepted_or_refused(values: dict[str, Any]) -> None:
    answered(lambda: SamplingParams(**values))
    answered(lambda: SamplingParams.from_dict(values))
    answered(lambda: SamplingParams.from_optional(**values))


@FEW
@given(ODD, ODD)
def test_odd_values_inside_parameters_are_accepted_or_refused(one: Any, other: Any) -> None:
    answered(lambda: SamplingParams.from_dict(one))
    answered(lambda: SamplingParams(structured_outputs={"json": one}))
    answered(lambda: SamplingParams(structured_outputs={"choice": one, "regex": other}))
    answered(lambda: SamplingParams(repetition_detection={"max_pattern_size": one, "min_count": other}))
    answered(lambda: SamplingParams(logit_bias={1: one}, extra_args={"a": other}))
    answered(lambda: StructuredOutputsParams(grammar=one, whitespace_pattern=other))
    answered(lambda: BeamSearchParams(beam_width=one, max_tokens=other))
    answered(lambda: LoRARequest(one, other, "a"))
    answered(lambda: LoRARequest("a", 1, one, other))


@FEW
@given(ODD, ODD, ODD)
def test_odd_prompts_and_their_options_are_answered_or_refused(llm: LLM, prompt: Any, params: Any, other: Any) -> None:
    one = SamplingParams(max_tokens=1)
    answered(lambda: llm.generate(prompt, one, use_tqdm=False))
    answered(lambda: llm.generate([prompt], one, use_tqdm=False))
    answered(lambda: llm.generate("a", params, use_tqdm=False, priority=other))
    answered(lambda: llm.generate("a", one, use_tqdm=False, lora_request=other))
    answered(lambda: llm.generate("a", one, use_tqdm=False, tokenization_kwargs=other))
    answered(lambda: llm.beam_search(prompt, BeamSearchParams(beam_width=1, max_tokens=1), concurrency_limit=other))
    answered(lambda: llm.beam_search("a", params))
    settled(llm)


@FEW
@given(ODD, ODD, ODD)
def test_odd_arguments_of_an_engine_are_accepted_or_refused(llm: LLM, request_id: Any, params: Any, other: Any) -> None:
    engine, one = llm.engine, SamplingParams(max_tokens=1)
    answered(lambda: engine.add_request(request_id, [1], one, arrival_time=other))
    answered(lambda: engine.add_request("a", [1], params, priority=other))
    answered(lambda: engine.add_request("b", [1], one, trace_headers=other))
    answered(lambda: engine.abort(request_id))
    answered(lambda: engine.abort_request(other))
    answered(lambda: engine.add_lora(other))
    answered(lambda: engine.remove_lora(other))
    answered(lambda: engine.pin_lora(other))
    answered(lambda: engine.tokenize(other))
    settled(llm)


@FEW
@given(ODD, ODD, st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id", "other"]))
def test_odd_chats_are_answered_or_refused(llm: LLM, one: Any, other: Any, key: str) -> None:
    once = SamplingParams(max_tokens=1)
    message = {"role": "user", "content": "a"}
    answered(lambda: llm.chat(one, once, use_tqdm=False))
    answered(lambda: llm.chat([one, other], once, use_tqdm=False))
    answered(lambda: llm.chat([{**message, key: one}], once, use_tqdm=False))
    answered(lambda: llm.chat([{"role": "assistant", "content": [one], key: other}], once, use_tqdm=False))
    function = {"name": one, "arguments": other}
    answered(lambda: llm.chat([{"role": "assistant", "tool_calls": [{"function": function}]}], once, use_tqdm=False))
    for name in ChatOptions.__slots__:
        answered(lambda name=name: llm.chat([message], once, use_tqdm=False, **{name: one}))  # type: ignore[misc]
    settled(llm)


@FEW
@given(st.dictionaries(st.sampled_from([field.name for field in fields(EngineArgs)]), ODD, max_size=3))
def test_odd_engine_options_are_accepted_or_refused(values: dict[str, Any]) -> None:
    answered(lambda: EngineArgs(**{"model": "m", **values}).create_engine_config())


async def test_odd_arguments_of_an_async_engine_leave_no_request_behind(llama: TinyModel) -> None:
    engine = AsyncLLMEngine.from_engine_args(
        AsyncEngineArgs(llama.folder, core_in_process=True, dtype="float32", num_blocks=80, block_size=16)
    )
    once = SamplingParams(max_tokens=1)
    message = {"role": "user", "content": "a"}
    for odd in ODD_VALUES:
        streams: list[Callable[[], AsyncIterator[Any]]] = [
            lambda odd=odd: engine.generate(odd, once, 0),  # type: ignore[misc]
            lambda odd=odd: engine.generate([1], odd, 0),  # type: ignore[misc]
            lambda odd=odd: engine.generate([1], once, odd),  # type: ignore[misc]
            lambda odd=odd: engine.generate([1], once, 0, priority=odd),  # type: ignore[misc]
            lambda odd=odd: engine.generate([1], once, 0, lora_request=odd),  # type: ignore[misc]
            lambda odd=odd: engine.generate([1], once, 0, trace_headers=odd),  # type: ignore[misc]
            lambda odd=odd: engine.chat(odd, once, 0),  # type: ignore[misc]
            lambda odd=odd: engine.chat([{**message, "content": odd}], once, 0),  # type: ignore[misc]
            lambda odd=odd: engine.chat([message], once, 0, tools=odd),  # type: ignore[misc]
        ]
        for stream in streams:
            with contextlib.suppress(HeadraceEngineError):
                async for _ in stream():
                    pass
        for call in (engine.abort, engine.add_lora, engine.remove_lora, engine.pin_lora):
            with contextlib.suppress(HeadraceEngineError):
                await call(odd)
    assert engine.get_num_unfinished_requests() == 0
    assert not engine.errored
    await engine.shutdown()
