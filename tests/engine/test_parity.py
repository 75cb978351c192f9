"""The engine's greedy float32 tokens are those of transformers' own `generate`, one request at a time.

Batches, chunks, preemptions, cache hits, arrival orders and attention backends must not change a single token.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from engine.model_families import VOCAB_SIZE, WINDOW
from engine.tiny_models import TinyModel
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.core.runner_factory import create_runner
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.requests.request import EngineCoreRequest, FinishReason
from headrace_engine.requests.sampling_params import SamplingParams

pytestmark = pytest.mark.rotated("engine/headrace_engine/runner/models", "engine/headrace_engine/runner/attention")

# Every scenario by itself, on one model of each way to attend; test_model_families.py has all families.
ARCHITECTURES = ("llama", "mistral", "gemma2", "gpt2", "gpt_oss", "deepseek_v3")
MAX_MODEL_LEN = 112


@cache
def workload() -> list[tuple[list[int], int]]:
    """16 prompts of 1 to 80 tokens with their max_tokens; some share a prefix, two are the same."""
    draw = random.Random(20)  # not pytest's seed: references are made once
    lengths = [1, 2, 3, 15, 16, 17, 31, 33, 64, 80]
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    prefix = [draw.randrange(3, VOCAB_SIZE) for _ in range(48)]
    prompts += [[*prefix, *(draw.randrange(3, VOCAB_SIZE) for _ in range(length))] for length in (1, 7, 20, 30)]
    prompts += [prefix, prefix]
    return [(prompt, draw.choice([1, 5, 12, 18, 24, 30])) for prompt in prompts]


_REFERENCES: dict[str, list[list[int]]] = {}


def references(model: TinyModel) -> list[list[int]]:
    if model.name not in _REFERENCES:
        _REFERENCES[model.name] = [model.generate(prompt, max_tokens) for prompt, max_tokens in workload()]
    return _REFERENCES[model.name]


class Run:
    """The workload through a core, with arrivals spread over steps."""

    def __init__(self, model: TinyModel, *, order: list[int] | None = None, steps_between: int = 0, **options: Any):
        args = {"dtype": "float32", "block_size": 16, "num_blocks": 150, "max_model_len": MAX_MODEL_LEN, **options}
        config = EngineArgs(model=model.folder, **args).create_engine_config()
        self.core = EngineCore(config, create_runner(config))
        self.tokens: dict[str, list[int]] = {}
        self.preemptions = self.hit_tokens = self.cached_tokens = 0
        for index in order or range(len(workload())):
            prompt, max_tokens = workload()[index]
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            self.core.add_request(
                EngineCoreRequest(request_id=str(index), prompt_token_ids=prompt, sampling_params=params, seed=0)
            )
            for _ in range(steps_between):
                self._step()
        while self.core.has_work():
            self._step()

    def _step(self) -> None:
        result = self.core.step()
        self.core.check_integrity()
        self.preemptions += result.stats.preemptions
        self.hit_tokens += result.stats.prefix_hit_tokens
        for news in result.outputs:
            self.tokens.setdefault(news.request_id, []).extend(news.new_token_ids)
            assert news.finish_reason in (None, FinishReason.LENGTH)

    def in_order(self) -> list[list[int]]:
        return [self.tokens[str(index)] for index in range(len(workload()))]


@pytest.fixture(params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    return tiny_model(request.param)


backends = pytest.mark.parametrize("backend", ["native", "torch"])


@backends
@pytest.mark.parametrize("block_size", [16, 32])
def test_a_batch_of_mixed_requests_generates_what_each_does_alone(
    model: TinyModel, backend: str, block_size: int
) -> None:
    run = Run(model, attention_backend=backend, block_size=block_size, enable_prefix_caching=False)
    assert run.in_order() == references(model)
    assert run.preemptions == run.hit_tokens == 0


@backends
def test_preempted_requests_compute_their_tokens_again_and_go_on(model: TinyModel, backend: str) -> None:
    run = Run(model, attention_backend=backend, num_blocks=15, enable_prefix_caching=False)
    assert run.preemptions >= 3
    assert run.in_order() == references(model)


@backends
def test_prompts_in_chunks_of_seven_tokens_give_the_same_tokens(model: TinyModel, backend: str) -> None:
    run = Run(model, attention_backend=backend, max_num_batched_tokens=7, enable_prefix_caching=False)
    assert run.in_order() == references(model)


@backends
def test_cached_prefixes_give_the_same_tokens(model: TinyModel, backend: str) -> None:
    run = Run(model, attention_backend=backend, steps_between=1)
    assert run.hit_tokens >= 3 * 48 + 2 * 32
    assert run.in_order() == references(model)


@backends
def test_preemption_chunks_and_cache_hits_together_give_the_same_tokens(model: TinyModel, backend: str) -> None:
    run = Run(model, attention_backend=backend, num_blocks=13, max_num_batched_tokens=19, max_num_seqs=7)
    assert run.preemptions >= 1
    assert run.hit_tokens >= 48
    assert run.in_order() == references(model)


@backends
@pytest.mark.parametrize("seed", [1, 2])
def test_arrival_order_and_company_do_not_matter(model: TinyModel, backend: str, seed: int) -> None:
    order = list(range(len(workload())))
    random.Random(seed).shuffle(order)
    run = Run(model, attention_backend=backend, order=order, steps_between=seed * 2, max_num_seqs=6)
    assert run.in_order() == references(model)


def test_the_workload_is_longer_than_the_sliding_window() -> None:
    assert max(len(prompt) for prompt, _ in workload()) > 3 * WINDOW
    assert len(workload()) == 16
