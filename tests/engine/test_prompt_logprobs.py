"""Prompt log-probabilities are those of transformers' own forward pass, however the prompt was computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.tiny_models import VOCAB_SIZE, TinyModel
from headrace_engine import LLMEngine, RequestOutput, SamplingParams
from headrace_engine.errors import InvalidRequestError
from headrace_engine.requests.outputs import Logprob
from headrace_engine.requests.sampling_params import RequestOutputKind

pytestmark = pytest.mark.rotated(
    "engine/headrace_engine/runner",
    "engine/headrace_engine/core/kv_cache_manager.py",
    "engine/headrace_engine/core/step_plan.py",
    "engine/headrace_engine/api/output_processor.py",
)

MakeEngine = Callable[..., LLMEngine]
DRAW = random.Random(7)
PROMPTS = [[DRAW.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 2, 17, 40, 90)]
COUNT = 3


@pytest.fixture(scope="module", params=["cpu", "static-cpu"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@torch.inference_mode()
def expected(model: TinyModel, prompt: list[int]) -> torch.Tensor:
    """[tokens, vocabulary]: of what follows each token."""
    logits = model.reference(torch.tensor([prompt])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def check(model: TinyModel, prompt: list[int], found: list[dict[int, Logprob] | None] | None, count: int) -> None:
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    rows = expected(model, prompt)
    for position, entry in enumerate(found[1:], start=1):
        assert entry is not None
        row, own = rows[position - 1], prompt[position]
        best = row.topk(count).indices.tolist()
        assert list(entry) == [own, *(token for token in best if token != own)]
        for token_id, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(row[token_id]), abs=2e-4)
            assert logprob.rank == int((row > row[token_id]).sum()) + 1


def run(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams) -> dict[str, list[RequestOutput]]:
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"num_blocks": 10, "max_model_len": 128, "max_num_batched_tokens": 33},
        {"attention_backend": "torch", "max_num_batched_tokens": 50},
        {"core_in_process": False, "max_num_batched_tokens": 19},
    ],
    ids=["whole", "chunks of 7", "preemption", "torch attention", "child process"],
)
def test_they_are_those_of_transformers(
    make_engine: MakeEngine, llama: TinyModel, device: str, options: dict[str, Any]
) -> None:
    if device == "static-cpu" and "attention_backend" in options:
        pytest.skip("the device has its own attention")
    engine = make_engine(**options)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, prompt_logprobs=COUNT)
    for name, outputs in run(engine, PROMPTS, params).items():
        check(llama, PROMPTS[int(name)], outputs[-1].prompt_logprobs, COUNT)


def test_a_cached_prefix_is_computed_again_for_them_and_serves_the_others(
    make_engine: MakeEngine, llama: TinyModel
) -> None:
    engine = make_engine()
    plain = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    asking = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=0)
    (first,) = run(engine, [PROMPTS[-1]], plain).values()
    (second,) = run(engine, [PROMPTS[-1]], asking).values()
    (third,) = run(engine, [PROMPTS[-1]], plain).values()
    assert (second[-1].num_cached_tokens, third[-1].num_cached_tokens) == (0, 80)
    check(llama, PROMPTS[-1], second[-1].prompt_logprobs, 0)
    assert third[-1].prompt_logprobs is None
    assert first[-1].outputs[0].token_ids == second[-1].outputs[0].token_ids == third[-1].outputs[0].token_ids


def test_deltas_bring_them_once_and_with_the_first_token(make_engine: MakeEngine, llama: TinyModel) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=1, output_kind=RequestOutputKind.DELTA)
    (outputs,) = run(make_engine(), [PROMPTS[2]], params).values()
    assert [output.prompt_logprobs is not None for output in outputs] == [True, False, False, False]
    check(llama, PROMPTS[2], outputs[0].prompt_logprobs, 1)


def test_several_choices_share_them(make_engine: MakeEngine, llama: TinyModel) -> None:
    params = SamplingParams(n=3, max_tokens=4, ignore_eos=True, prompt_logprobs=1, seed=3)
    (outputs,) = run(make_engine(), [PROMPTS[3]], params).values()
    check(llama, PROMPTS[3], outputs[-1].prompt_logprobs, 1)


def test_all_of_the_vocabulary_may_be_asked_for_where_the_engine_allows_it(
    make_engine: MakeEngine, llama: TinyModel
) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, logprobs=-1)
    (outputs,) = run(make_engine(max_logprobs=-1), [PROMPTS[1]], params).values()
    check(llama, PROMPTS[1], outputs[-1].prompt_logprobs, VOCAB_SIZE)
    (entry,) = outputs[-1].outputs[0].logprobs or []
    assert len(entry) == VOCAB_SIZE
    with pytest.raises(InvalidRequestError) as refused:
        make_engine().add_request("a", PROMPTS[1], SamplingParams(prompt_logprobs=-1, logprobs=21))
    assert refused.value.problems == [
        "logprobs must be at most 20, the engine's max_logprobs, got 21",
        f"prompt_logprobs must be at most 20, the engine's max_logprobs, got -1, which is {VOCAB_SIZE}",
    ]
