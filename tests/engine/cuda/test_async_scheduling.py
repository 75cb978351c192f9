"""The GPU's runner, launched ahead, on the CPU: tokens that the host has not seen are the next step's inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.cuda.cuda_on_cpu import make_core
from engine.cuda.test_cuda_runner import PROMPTS, WORKLOAD, generate
from engine.tiny_models import TinyModel, generate_greedily
from headrace_engine.requests.request import EngineCoreRequest
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.contracts import LaunchedStep, StepBatch
from headrace_engine.runner.sampling import graph_sampling

pytestmark = pytest.mark.rotated_file("engine/headrace_engine/runner/cuda")


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
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
    assert generate_greedily(make_core(model, async_scheduling=True, **options), WORKLOAD) == expected


@pytest.mark.parametrize(
    "special",
    [
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1.0, "logprobs": 3},
        {"temperature": 0.0, "prompt_logprobs": 2},
        {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 1.0, "min_tokens": 4, "stop_token_ids": [5, 6, 7]},
        {"temperature": 0.0, "allowed_token_ids": [3, 4, 5]},
    ],
    ids=lambda special: ", ".join(special),
)
def test_batch_mates_that_the_host_has_to_draw_for_change_nobodys_tokens(
    llama: TinyModel, special: dict[str, Any]
) -> None:
    common: dict[str, Any] = {"ignore_eos": True}
    params = [
        SamplingParams(**common, max_tokens=16, temperature=0.0),
        SamplingParams(**common, max_tokens=4, temperature=1.0),
        SamplingParams(**common, max_tokens=14, temperature=1.0, min_p=0.1),
        SamplingParams(**common, max_tokens=5, **special),  # comes behind steps in flight, and leaves others behind
        SamplingParams(**common, max_tokens=9, temperature=1.0),
    ]
    expected, expected_logprobs = generate(make_core(llama, max_num_seqs=3), params)
    found, logprobs = generate(make_core(llama, max_num_seqs=3, async_scheduling=True), params)
    assert found == expected
    for own, other in zip(logprobs, expected_logprobs, strict=True):
        assert own == pytest.approx(other, abs=1e-3)


def test_steps_are_in_flight_while_the_next_is_scheduled(llama: TinyModel) -> None:
    core = make_core(llama, async_scheduling=True)
    for index, temperature in enumerate((0.0, 1.0)):
        params = SamplingParams(max_tokens=10, temperature=temperature, ignore_eos=True)
        core.add_request(
            EngineCoreRequest(
                request_id=str(index), prompt_token_ids=PROMPTS[index], sampling_params=params, seed=index
            )
        )
    news = [len(core.step().outputs) for _ in range(11)]
    assert news == [0] + 10 * [2]
    assert not core.scheduler.requests


def test_a_draw_that_the_host_makes_anew_takes_back_the_step_behind_it(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_sampling, "CANDIDATES", 4)  # far too few for these
    common: dict[str, Any] = {"ignore_eos": True}
    params = [
        SamplingParams(**common, max_tokens=16, temperature=30.0, top_p=0.95),
        SamplingParams(**common, max_tokens=16, temperature=30.0, top_k=60),
        SamplingParams(**common, max_tokens=7, temperature=0.0),
        SamplingParams(**common, max_tokens=16, temperature=30.0, top_p=0.9, min_p=0.001),
        # comes when one has ended, and is waited for: the others' tokens are known then
        SamplingParams(**common, max_tokens=4, temperature=1.0, repetition_penalty=1.3),
    ]
    expected, _ = generate(make_core(llama, max_num_seqs=4), params)
    core = make_core(llama, max_num_seqs=4, async_scheduling=True)
    void: list[str] = []
    launch = core.runner.launch_model  # type: ignore[attr-defined]

    def watched(batch: StepBatch) -> LaunchedStep:
        if core._executor._in_flight is not None:
            before = core._executor._in_flight.step
            launched: LaunchedStep = launch(batch)
            void.extend(before.result().void_request_ids)
            return launched
        return launch(batch)  # type: ignore[no-any-return]

    monkeypatch.setattr(core.runner, "launch_model", watched)
    found, _ = generate(core, params)
    assert found == expected
    assert set(void) == {"0", "1", "3"}
