"""Speculative decoding changes no token: not for greedy requests, not for sampled ones, not under memory pressure."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.test_parity import VOCAB_SIZE, Run, TinyModel, references
from headrace_engine.config import EngineArgs
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.core.runner_factory import create_runner
from headrace_engine.llm_engine import LLMEngine
from headrace_engine.request import EngineCoreRequest, FinishReason
from headrace_engine.runner.contracts import TokenLogprobs
from headrace_engine.sampling_params import SamplingParams

pytestmark = pytest.mark.torch

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
PRESSURE = {"num_blocks": 13, "max_num_batched_tokens": 19, "max_num_seqs": 7}


class Generation:
    """Requests through a core of their own; counts what was drafted and accepted."""

    def __init__(self, model: TinyModel, requests: list[EngineCoreRequest], **options: Any) -> None:
        args = {"dtype": "float32", "block_size": 16, "num_blocks": 80, "max_model_len": 112, **options}
        config = EngineArgs(model=model.folder, **args).create_engine_config()
        core = EngineCore(config, create_runner(config))
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.drafted = self.accepted = self.preemptions = 0
        for request in requests:
            core.add_request(EngineCoreRequest.from_wire(request.to_wire()))
        while core.has_work():
            news = core.step()
            core.check_integrity()
            self.drafted += sum(news.stats.drafted_per_position)
            self.accepted += sum(news.stats.accepted_per_position)
            self.preemptions += news.stats.preemptions
            for output in news.outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.logprobs is not None:
                    self.logprobs.setdefault(output.request_id, []).extend(output.logprobs)
                if output.finish_reason is not None:
                    self.finished[output.request_id] = output.finish_reason
        pool = core.scheduler.kv.pool
        assert pool.num_free == pool.num_usable


def requests_of_all_kinds() -> list[EngineCoreRequest]:
    draw = random.Random(4)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.7, "seed": 5, "logprobs": 2},
        {"temperature": 0.4, "top_p": 0.9, "top_k": 20},
        {"temperature": 0.3, "repetition_penalty": 1.3},
        {"temperature": 0.0, "frequency_penalty": 0.8, "presence_penalty": 0.4, "logprobs": 0},
        {"temperature": 0.5, "min_tokens": 9, "stop_token_ids": list(range(3, 120))},
        {"temperature": 0.0, "stop_token_ids": list(range(3, 30))},
    ]
    requests = []
    for index, kind in enumerate(kinds):
        motif = [draw.randrange(3, VOCAB_SIZE) for _ in range(5)]
        prompt = (motif * 9)[: draw.randint(6, 40)]
        params = SamplingParams(max_tokens=draw.choice([1, 13, 40]) if index < 2 else 40, ignore_eos=True, **kind)
        requests.append(
            EngineCoreRequest(request_id=str(index), prompt_token_ids=prompt, sampling_params=params, seed=index)
        )
    return requests


def assert_same(found: Generation, plain: Generation) -> None:
    assert found.tokens == plain.tokens
    assert found.finished == plain.finished
    assert found.logprobs.keys() == plain.logprobs.keys()
    for request_id, entries in plain.logprobs.items():
        pairs = [
            pair
            for one, other in zip(found.logprobs[request_id], entries, strict=True)
            for pair in zip(one, other, strict=True)
        ]
        assert [(a[0], a[2]) for a, _ in pairs] == [(b[0], b[2]) for _, b in pairs]
        assert [a[1] for a, _ in pairs] == pytest.approx([b[1] for _, b in pairs], abs=1e-3)


@pytest.fixture(scope="module")
def plain(llama: TinyModel) -> Generation:
    return Generation(llama, requests_of_all_kinds())


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("pressure", [{}, PRESSURE], ids=["roomy", "tight"])
def test_greedy_tokens_are_those_of_transformers(llama: TinyModel, backend: str, pressure: dict[str, Any]) -> None:
    run = Run(llama, attention_backend=backend, speculative_config=NGRAM, **pressure)
    assert run.in_order() == references(llama)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt2"])
def test_sliding_windows_and_other_positions_are_verified_too(
    tiny_model: Callable[[str], TinyModel], name: str
) -> None:
    model = tiny_model(name)
    assert Run(model, speculative_config=NGRAM).in_order() == references(model)


@pytest.mark.parametrize("pressure", [{}, PRESSURE], ids=["roomy", "tight"])
def test_every_kind_of_request_gets_the_tokens_that_it_gets_without_drafts(
    llama: TinyModel, plain: Generation, pressure: dict[str, Any]
) -> None:
    found = Generation(llama, requests_of_all_kinds(), speculative_config=NGRAM, **pressure)
    assert found.accepted > 0
    assert found.accepted < found.drafted
    assert bool(found.preemptions) is bool(pressure)
    assert_same(found, plain)


def test_a_stop_string_in_the_middle_of_accepted_tokens_cuts_behind_its_token(
    make_engine: Callable[..., LLMEngine],
) -> None:
    outcomes = []
    for options in ({}, {"speculative_config": {**NGRAM, "num_speculative_tokens": 9}}):
        engine = make_engine(**options)
        whole = finish(engine, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=0))
        stop = [whole.text[index : index + 3] for index in range(20, len(whole.text) - 3, 7)]
        cut = [
            finish(engine, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=0, stop=[text]))
            for text in stop
        ]
        assert len(cut) > 3
        assert all(len(one.logprobs) == len(one.token_ids) for one in cut)
        outcomes.append([(one.token_ids, one.text, one.stop_reason) for one in [whole, *cut]])
    assert outcomes[0] == outcomes[1]


def finish(engine: LLMEngine, params: SamplingParams) -> Any:
    engine.add_request("a", [7, 8, 9] * 6, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs[-1].outputs[0]
