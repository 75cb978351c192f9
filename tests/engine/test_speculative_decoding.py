"""Speculative decoding changes no token: not for greedy requests, not for sampled ones, not under memory pressure."""

from __future__ import annotations

import random
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.test_parity import VOCAB_SIZE, Run, TinyModel, references
from headrace_engine.api.llm_engine import LLMEngine
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.core.runner_factory import create_runner
from headrace_engine.errors import ConfigError
from headrace_engine.options.config import ModelConfig
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.requests.request import EngineCoreRequest, FinishReason
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.contracts import KVSpec, TokenLogprobs
from headrace_engine.runner.models.draft_model import DraftModel

pytestmark = pytest.mark.rotated(
    "engine/headrace_engine/core/speculation.py",
    "engine/headrace_engine/core/scheduler.py",
    "engine/headrace_engine/runner/models",
    "engine/headrace_engine/runner/sampling",
)

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


@pytest.fixture(scope="module", params=["ngram", "own draft", "foreign draft"])
def speculative_config(
    request: pytest.FixtureRequest, llama: TinyModel, tiny_model: Callable[[str], TinyModel]
) -> dict[str, Any]:
    """Drafts from the text, from the served model itself, and from one that knows nothing of it."""
    if request.param == "ngram":
        return NGRAM
    draft = llama if request.param == "own draft" else tiny_model("qwen3")
    return drafted_by(draft)


def drafted_by(model: TinyModel, num_tokens: int = 3) -> dict[str, Any]:
    return {"method": "draft_model", "model": model.folder, "num_speculative_tokens": num_tokens}


@pytest.fixture(scope="module")
def plain(llama: TinyModel) -> Generation:
    return Generation(llama, requests_of_all_kinds())


@pytest.mark.parametrize("pressure", [{}, PRESSURE], ids=["roomy", "tight"])
def test_greedy_tokens_are_those_of_transformers(
    llama: TinyModel, speculative_config: dict[str, Any], pressure: dict[str, Any]
) -> None:
    run = Run(llama, speculative_config=speculative_config, **pressure)
    assert run.in_order() == references(llama)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt2"])
def test_sliding_windows_and_other_positions_are_verified_too(
    tiny_model: Callable[[str], TinyModel], name: str
) -> None:
    model = tiny_model(name)
    assert Run(model, speculative_config=NGRAM).in_order() == references(model)


@pytest.mark.parametrize("pressure", [{}, PRESSURE], ids=["roomy", "tight"])
def test_every_kind_of_request_gets_the_tokens_that_it_gets_without_drafts(
    llama: TinyModel, plain: Generation, speculative_config: dict[str, Any], pressure: dict[str, Any]
) -> None:
    found = Generation(llama, requests_of_all_kinds(), speculative_config=speculative_config, **pressure)
    assert found.drafted > 0
    assert bool(found.preemptions) is bool(pressure)
    assert_same(found, plain)


def test_a_draft_by_the_served_model_itself_is_accepted_whatever_the_sampling(llama: TinyModel) -> None:
    found = Generation(llama, requests_of_all_kinds(), speculative_config=drafted_by(llama))
    # Float32 products of other shapes may round differently, and that may turn a draw; it hardly ever does.
    assert found.accepted >= 0.98 * found.drafted
    assert found.drafted > 100


def test_drafts_survive_a_prefix_that_came_from_the_cache(llama: TinyModel) -> None:
    # Two blocks of the second prompt are hits: the draft model must find its own K/V in them as well.
    requests = [
        EngineCoreRequest(
            request_id=name,
            prompt_token_ids=[9, 5, 7, 11] * 10,
            sampling_params=SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
            seed=0,
        )
        for name in "ab"
    ]
    found = Generation(llama, requests, speculative_config=drafted_by(llama), max_num_seqs=1)
    assert found.tokens["a"] == found.tokens["b"]
    assert found.accepted >= 0.98 * found.drafted
    assert found.drafted > 20


def test_sampled_tokens_follow_the_models_own_distribution(
    llama: TinyModel, tiny_model: Callable[[str], TinyModel]
) -> None:
    """Chi-square of the second token of 1,500 requests against transformers' probabilities, under a foreign draft."""
    prompt, top_k, count = [5, 6, 7], 4, 1500
    params = SamplingParams(temperature=1.0, top_k=top_k, max_tokens=3, ignore_eos=True)
    requests = [
        EngineCoreRequest(request_id=str(seed), prompt_token_ids=prompt, sampling_params=params, seed=seed)
        for seed in range(count)
    ]
    drafts = drafted_by(tiny_model("qwen3"))
    found = Generation(llama, requests, speculative_config=drafts, num_blocks=300, max_num_seqs=256)
    assert found.drafted > count / 2
    expected: dict[tuple[int, int], float] = {}
    for first, probability in _probabilities(llama, prompt, top_k):
        for second, conditional in _probabilities(llama, [*prompt, first], top_k):
            expected[first, second] = probability * conditional * count
    drawn = Counter((tokens[0], tokens[1]) for tokens in found.tokens.values())
    assert drawn.keys() <= expected.keys()
    kept = {pair: number for pair, number in expected.items() if number >= 5}
    rest = count - sum(kept.values())
    statistic = sum((drawn[pair] - number) ** 2 / number for pair, number in kept.items())
    statistic += (count - sum(drawn[pair] for pair in kept) - rest) ** 2 / max(rest, 5.0)
    # Mean and deviation of chi-square with len(kept) degrees of freedom; the seeds are fixed, so this cannot flake.
    assert statistic < len(kept) + 4 * (2 * len(kept)) ** 0.5


@torch.inference_mode()
def _probabilities(model: TinyModel, tokens: list[int], top_k: int) -> list[tuple[int, float]]:
    best = model.reference(torch.tensor([tokens])).logits[0, -1].topk(top_k)
    return list(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))


def test_the_draft_models_memory_is_counted(llama: TinyModel) -> None:
    def spec(**options: Any) -> KVSpec:
        config = EngineArgs(model=llama.folder, dtype="float32", block_size=16, **options).create_engine_config()
        runner = create_runner(config)
        runner.load_model()
        return runner.kv_spec()

    assert spec(speculative_config=drafted_by(llama)).bytes_per_block == 2 * spec().bytes_per_block


def test_a_draft_model_that_does_not_fit_the_served_one_is_refused(llama: TinyModel, tmp_path: Path) -> None:
    config = transformers.LlamaConfig.from_pretrained(llama.folder, vocab_size=VOCAB_SIZE + 1)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "vocabulary")
    config = transformers.LlamaConfig.from_pretrained(llama.folder, max_position_embeddings=128)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "positions")
    for name, problem in (
        ("vocabulary", "has 385 tokens in its vocabulary, the served model 384"),
        ("positions", "max_model_len must be at most 128, the model's positions, got 256"),
    ):
        options = {"method": "draft_model", "model": str(tmp_path / name), "num_speculative_tokens": 2}
        with pytest.raises(ConfigError, match=problem):
            create_runner(
                EngineArgs(model=llama.folder, speculative_config=options).create_engine_config()
            ).load_model()


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


def test_a_draft_model_takes_no_revision_and_no_generation_config_of_the_served_one(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineArgs(
        model=llama.folder,
        revision="v2",
        tokenizer_revision="v2",
        generation_config=llama.folder,
        override_generation_config={"top_k": 3},
        speculative_config=drafted_by(llama),
    ).create_engine_config()
    taken: list[ModelConfig] = []

    class Model:
        info = types.SimpleNamespace(vocab_size=VOCAB_SIZE)
        bytes_per_state = 0

        def __init__(self, model: ModelConfig, _cache: object) -> None:
            taken.append(model)

    monkeypatch.setattr("headrace_engine.runner.models.draft_model.PagedModel", Model)
    DraftModel(config, types.SimpleNamespace(max_model_len=64, vocab_size=VOCAB_SIZE))  # type: ignore[arg-type]
    (model,) = taken
    assert (model.revision, model.tokenizer_revision) == (None, None)
    assert (model.generation_config, model.override_generation_config) == ("vllm", {})
