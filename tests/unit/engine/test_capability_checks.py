"""Checks of what an engine lacks: each message has the field, the value, the limit and the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from headrace_engine.api.request_checks import RequestChecks
from headrace_engine.core.process import EngineCoreProcess
from headrace_engine.errors import ConfigError, InvalidRequestError, LoRAError
from headrace_engine.options.capabilities import EngineCapabilities, config_problems
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.contracts import DRAWS, ModelInfo
from headrace_engine.runner.sampling.rng import uniform
from unit.engine import fake_engine

MODEL = ModelInfo(
    vocab_size=5000,
    max_model_len=64,
    eos_token_ids=[2, 3],
    architecture="Fake",
    dtype="float32",
    device="cpu",
    attention="fake",
    num_parameters=0,
)
VLLM_V2 = replace(
    EngineCapabilities.of_everything(draws="vllm-0.32-v2"),
    max_allowed_token_ids=1024,
    max_logit_bias=1024,
    max_stop_token_ids=128,
    max_bad_words=128,
    max_bad_words_tokens=1024,
    temperature_range=(0.01, 2.0),
)
"""Beyond each of these, vLLM's model runner raises and ends the engine, or draws by another temperature in silence."""


def problems(
    capabilities: EngineCapabilities, bad_words_token_ids: Sequence[Sequence[int]] = (), **params: Any
) -> list[str]:
    checks = RequestChecks(MODEL, -1, (), "vllm", capabilities)
    try:
        checks.check_params([1], SamplingParams.from_dict(params), bad_words_token_ids)
    except InvalidRequestError as refused:
        return refused.problems
    return []


@pytest.mark.parametrize(
    ("within", "beyond", "sentence"),
    [
        (
            {"allowed_token_ids": list(range(1024))},
            {"allowed_token_ids": list(range(2000))},
            "allowed_token_ids has 2000 entries, the engine vllm takes at most 1024",
        ),
        (
            {"logit_bias": dict.fromkeys(range(1024), 1.0)},
            {"logit_bias": dict.fromkeys(range(1025), 1.0)},
            "logit_bias has 1025 entries, the engine vllm takes at most 1024",
        ),
        (
            {"stop_token_ids": list(range(2, 130)), "min_tokens": 1},  # the end tokens are among them
            {"stop_token_ids": list(range(10, 137)), "min_tokens": 1},
            "stop_token_ids and end tokens are 129 beside min_tokens, the engine vllm takes at most 128",
        ),
        (
            {"bad_words": ["a"], "bad_words_token_ids": [[5]] * 128},
            {"bad_words": ["a"], "bad_words_token_ids": [[5]] * 129},
            "bad_words makes 129 token sequences, the engine vllm takes at most 128",
        ),
        (
            {"bad_words": ["a"], "bad_words_token_ids": [[5] * 512] * 2},
            {"bad_words": ["a"], "bad_words_token_ids": [[5] * 512, [5] * 513]},
            "bad_words has 1025 tokens, the engine vllm takes at most 1024",
        ),
        (
            {"temperature": 2.0},
            {"temperature": 2.5},
            "temperature must be 0, or 0.01 to 2, with the engine vllm, got 2.5",
        ),
        (
            {"temperature": 0.01},
            {"temperature": 0.005},
            "temperature must be 0, or 0.01 to 2, with the engine vllm, got 0.005",
        ),
    ],
    ids=["allowed_token_ids", "logit_bias", "stop_token_ids", "bad_words", "bad_words_tokens", "hot", "cold"],
)
def test_a_request_up_to_a_limit_passes_and_one_beyond_it_is_refused_with_the_limit(
    within: dict[str, Any], beyond: dict[str, Any], sentence: str
) -> None:
    assert problems(VLLM_V2, **within) == []
    assert problems(VLLM_V2, **beyond) == [sentence]
    assert problems(EngineCapabilities.of_everything(), **beyond) == []


@pytest.mark.parametrize("temperature", [0, 1e-6])
def test_greedy_is_within_every_range_of_temperatures(temperature: float) -> None:
    assert problems(VLLM_V2, temperature=temperature) == []


def test_many_stop_tokens_are_nothing_to_an_engine_that_need_not_hold_them_back() -> None:
    assert problems(VLLM_V2, stop_token_ids=list(range(200))) == []


def test_everything_that_is_beyond_a_limit_is_told_at_once() -> None:
    told = problems(VLLM_V2, allowed_token_ids=list(range(1025)), temperature=3)
    assert told == [
        "allowed_token_ids has 1025 entries, the engine vllm takes at most 1024",
        "temperature must be 0, or 0.01 to 2, with the engine vllm, got 3",
    ]


@pytest.mark.parametrize(
    ("lacks", "asks", "sentence"),
    [
        ("prompt_logprobs", {"prompt_logprobs": 2}, "prompt_logprobs is 2, which the engine vllm does not support"),
        ("min_tokens", {"min_tokens": 3}, "min_tokens is 3, which the engine vllm does not support"),
        ("bad_words", {"bad_words": ["a", "b"]}, "bad_words has 2 entries, which the engine vllm does not support"),
        (
            "repetition_detection",
            {"repetition_detection": {"max_pattern_size": 4, "min_count": 3}},
            "repetition_detection.max_pattern_size is 4, which the engine vllm does not support",
        ),
    ],
)
def test_what_an_engine_does_not_have_is_refused_by_name(lacks: str, asks: dict[str, Any], sentence: str) -> None:
    assert problems(EngineCapabilities.of_everything(), **asks) == []
    assert problems(replace(EngineCapabilities.of_everything(), **{lacks: False}), **asks) == [sentence]
    assert problems(replace(EngineCapabilities.of_everything(), **{lacks: False})) == []


FORMS: dict[str, Any] = {
    "json": {"type": "object"},
    "regex": "a+",
    "choice": ["a", "b"],
    "grammar": "start: 'a'",
    "json_object": True,
}


@pytest.mark.parametrize("kind", FORMS)
def test_each_form_of_output_is_refused_where_it_is_not_served(kind: str) -> None:
    everything = EngineCapabilities.of_everything()
    asked = {"structured_outputs": {kind: FORMS[kind]}}
    others = tuple(other for other in FORMS if other != kind)
    assert problems(everything, **asked) == []
    refusal = f"structured_outputs asks for {kind}, the engine vllm supports {', '.join(others)}"
    assert problems(replace(everything, structured_outputs=others), **asked) == [refusal]
    nothing = f"structured_outputs asks for {kind}, the engine vllm supports none"
    assert problems(replace(everything, structured_outputs=()), **asked) == [nothing]


def test_priorities_salts_and_adapters_are_refused_where_the_engine_has_none() -> None:
    adapter = LoRARequest("fox", 1, "/adapters/fox")
    RequestChecks(MODEL, -1, (), "vllm", EngineCapabilities.of_everything()).check_features(5, "salt", adapter)
    none = RequestChecks(MODEL, -1, (), "vllm", EngineCapabilities())
    none.check_features(0, "", None)
    with pytest.raises(InvalidRequestError) as refused:
        none.check_features(5, "a secret", None)
    assert refused.value.problems == [
        "priority must be 0 with the engine vllm, got 5",
        "cache_salt is set, which the engine vllm does not support",
    ]
    with pytest.raises(LoRAError, match="'fox', but the engine vllm serves no LoRA adapters: enable_lora is not set"):
        none.check_features(0, "", adapter)


def test_a_seed_is_refused_where_it_would_repeat_nothing() -> None:
    refusal = "seed is 3, but the engine vllm cannot repeat what it draws: leave it out"
    assert problems(EngineCapabilities(), seed=3) == [refusal]
    assert problems(EngineCapabilities(), seed=3, temperature=0) == []
    assert problems(EngineCapabilities(draws="vllm-0.32-v2"), seed=3) == []


def test_a_plain_request_passes_the_door_of_an_engine_that_can_nothing() -> None:
    assert problems(EngineCapabilities(), temperature=0.7, top_p=0.9, n=2, stop=["x"], max_tokens=9) == []


def test_options_that_the_loaded_engine_does_not_serve_are_named() -> None:
    config = EngineArgs(
        model="m", enable_lora=True, logits_processors=["engine.processors:CountUp"]
    ).create_engine_config()
    assert config_problems(config, EngineCapabilities.of_everything()) == []
    assert config_problems(config, EngineCapabilities()) == [
        "enable_lora is set, but the engine headrace serves no LoRA adapters here",
        "logits_processors is engine.processors:CountUp, but the engine headrace takes none of Headrace's",
    ]


def test_a_folder_of_adapters_needs_an_engine_that_loads_them_while_it_runs() -> None:
    config = EngineArgs(model="m", enable_lora=True).create_engine_config()
    assert config_problems(config, EngineCapabilities(lora=True)) == []
    assert config.lora is not None
    config.lora.needs_hot_load = True
    assert config_problems(config, EngineCapabilities(lora=True, lora_hot_load=True)) == []
    [problem] = config_problems(config, EngineCapabilities(lora=True))
    assert "lora_dir is set, but the engine headrace loads no LoRA adapters while it runs" in problem


def test_an_engine_without_adapters_does_not_start_where_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch, tests_on_path: None
) -> None:
    fake_engine.offer(monkeypatch, "unit.engine.fake_engine:ENGINE")
    core = EngineCoreProcess(EngineArgs(model="m", engine="fake", enable_lora=True).create_engine_config())
    with pytest.raises(ConfigError, match="the engine fake serves no LoRA adapters"):
        core.wait_ready(20)
    core.kill()
    core.close()


def test_the_numbers_of_our_own_draws_have_not_changed_under_their_name() -> None:
    """Where this fails, raise `contracts.DRAWS`: requests that were begun with the old numbers continue with others."""
    drawn = [round(float(u), 12) for u in uniform([1, -5, 2**62], [0, 7, 100_000])]
    assert (DRAWS, drawn) == ("headrace-1", [0.368189515652, 0.563202803938, 0.001269921277])
