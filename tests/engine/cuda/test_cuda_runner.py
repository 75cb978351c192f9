"""The GPU's runner on the CPU: transformers' tokens, the CPU runner's draws, and one sentence where there is no GPU."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.cuda.cuda_on_cpu import make_core
from engine.model_families import VOCAB_SIZE
from engine.tiny_models import TinyModel, generate_greedily
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.core.runner_factory import create_runner
from headrace_engine.errors import ConfigError
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.requests.request import EngineCoreRequest
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.cuda.graphs import graph_sizes
from headrace_engine.runner.cuda.runner import CUDARunner

pytestmark = pytest.mark.rotated_file("engine/headrace_engine/runner/cuda")

DRAW = random.Random(5)
PREFIX = [DRAW.randrange(3, VOCAB_SIZE) for _ in range(33)]
PROMPTS = [[DRAW.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 2, 15, 16, 40, 64)]
PROMPTS += [[*PREFIX, 7], [*PREFIX, 9, 11]]
WORKLOAD = [(prompt, max_tokens) for prompt, max_tokens in zip(PROMPTS, (9, 14, 5, 20, 12, 7, 10, 16), strict=True)]


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_blocks": 11, "max_num_batched_tokens": 19, "max_num_seqs": 5}, {"enforce_eager": True}],
    ids=["padded steps", "preemptions and chunks", "steps as they are"],
)
def test_requests_generate_what_transformers_generates(
    tiny_model: Callable[[str], TinyModel], name: str, options: dict[str, Any]
) -> None:
    model = tiny_model(name)
    expected = [model.generate(prompt, max_tokens) for prompt, max_tokens in WORKLOAD]
    assert generate_greedily(make_core(model, **options), WORKLOAD) == expected


def test_the_triton_kernels_serve_a_model_in_the_interpreter(tiny_model: Callable[[str], TinyModel]) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: make test-triton")
    model = tiny_model("gpt_oss")  # sinks and windows
    workload = [(PROMPTS[4][:20], 3), (PROMPTS[1], 2)]
    expected = [model.generate(prompt, max_tokens) for prompt, max_tokens in workload]
    core = make_core(model, attention_backend="triton", max_num_batched_tokens=16, max_num_seqs=2, max_model_len=64)
    assert core.model_info.attention == "triton"
    assert generate_greedily(core, workload) == expected


def generate(core: EngineCore, params: list[SamplingParams]) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens, and all log-probabilities with their tokens and ranks, of one request for each of the parameters."""
    tokens: list[list[int]] = [[] for _ in params]
    logprobs: list[list[float]] = [[] for _ in params]
    for index, own in enumerate(params):
        prompt = PROMPTS[(index + 3) % len(PROMPTS)]
        core.add_request(
            EngineCoreRequest(request_id=str(index), prompt_token_ids=prompt, sampling_params=own, seed=index)
        )
    while core.has_work():
        for news in core.step().outputs:
            index = int(news.request_id)
            tokens[index] += news.new_token_ids
            for entries in (*(news.logprobs or ()), *(news.prompt_logprobs or ())):
                logprobs[index] += [number for entry in entries for number in entry]
    return tokens, logprobs


@pytest.mark.parametrize(("kept", "share"), [("fp8", 4), ("bfloat16", 2)])
def test_rounded_keys_and_values_give_what_plain_torch_gives_with_them(llama: TinyModel, kept: str, share: int) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: make test-triton")
    options: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 2, "max_model_len": 48}
    exact, expected, found = (
        make_core(llama, attention_backend=backend, kv_cache_dtype=own, **options)
        for backend, own in (("torch", "auto"), ("torch", kept), ("triton", kept))
    )
    assert exact.runner.kv_spec().bytes_per_block == share * found.runner.kv_spec().bytes_per_block
    params = [SamplingParams(max_tokens=3, temperature=0.0, logprobs=0, prompt_logprobs=0, ignore_eos=True)]
    unrounded, wanted, got = (
        torch.tensor(generate(core, params)[1][0]).view(-1, 3)[:, 1] for core in (exact, expected, found)
    )
    effect = (unrounded - wanted).abs().max()
    assert effect > 1e-3
    # A last bit may decide how a number is rounded; that seldom happens.
    assert (got - wanted).abs().max() < effect / 4


def test_draws_and_log_probabilities_are_those_of_the_cpu_runner(llama: TinyModel) -> None:
    common: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    choices: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 3.0},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 2.0, "top_p": 0.7},
        {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1.0, "logprobs": 3},
        {"temperature": 0.0, "prompt_logprobs": 2},
        {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 1.0, "min_tokens": 4, "stop_token_ids": [5, 6, 7]},
        {"temperature": 0.0, "allowed_token_ids": [3, 4, 5]},
    ]
    params = [SamplingParams(**common, **choice) for choice in choices]
    config = EngineArgs(
        model=llama.folder, dtype="float32", block_size=16, num_blocks=150, max_model_len=112
    ).create_engine_config()
    tokens, logprobs = generate(EngineCore(config, create_runner(config)), params)
    found, found_logprobs = generate(make_core(llama, max_num_seqs=6), params)
    assert found == tokens
    assert all(len(own) == 12 for own in tokens)
    assert [bool(own) for own in logprobs] == [
        choice.keys() & {"logprobs", "prompt_logprobs"} != set() for choice in choices
    ]
    for own, expected in zip(found_logprobs, logprobs, strict=True):
        assert own == pytest.approx(expected, abs=1e-3)


def test_drafts_are_verified_as_on_the_cpu(llama: TinyModel) -> None:
    repeated = ([*PROMPTS[3], *PROMPTS[3]], 24)
    speculative = {"method": "ngram", "num_speculative_tokens": 3}
    core = make_core(llama, speculative_config=speculative)
    assert generate_greedily(core, [repeated, *WORKLOAD]) == [
        llama.generate(prompt, max_tokens) for prompt, max_tokens in (repeated, *WORKLOAD)
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_start_ends_with_one_sentence(llama: TinyModel) -> None:
    config = EngineArgs(model=llama.folder, device="cuda").create_engine_config()
    with pytest.raises(
        ConfigError, match=r"device cuda was asked for, but torch .* is built without CUDA|no usable GPU"
    ):
        create_runner(config)


def test_options_that_the_runner_does_not_know_are_refused(llama: TinyModel) -> None:
    with pytest.raises(ConfigError, match="batch_invariant is set, which device cuda cannot do"):
        EngineArgs(model=llama.folder, device="cuda", batch_invariant=True).create_engine_config()
    drafts = {"method": "draft_model", "model": "x", "num_speculative_tokens": 2}
    config = EngineArgs(model=llama.folder, device="cuda", speculative_config=drafts).create_engine_config()
    with pytest.raises(ConfigError, match="method must be ngram on device cuda"):
        CUDARunner(config, torch.device("cpu"))


def test_adapters_are_refused(llama: TinyModel) -> None:
    with pytest.raises(ConfigError, match="serves no LoRA adapters"):
        make_core(llama, enable_lora=True)


def test_eager_steps_may_be_asked_for_where_there_are_no_graphs() -> None:
    EngineArgs(model="x", device="cpu", enforce_eager=True).create_engine_config()
    with pytest.raises(ConfigError, match="enforce_eager is set, but device neuron computes nothing that is not"):
        EngineArgs(model="x", device="neuron", enforce_eager=True).create_engine_config()


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 64, 256, 257, 300])
def test_every_number_of_sequences_has_a_graph(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == most
