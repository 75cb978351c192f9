"""A request that is cut at any place and continues after its emitted tokens ends as it would have ended whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from headrace_engine.requests.request import FinishReason
from headrace_engine.requests.sampling_params import RepetitionDetectionParams, SamplingParams
from vllm_engine.driven_engine import Answer, Case, DrivenEngine

TOKENS = 40
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 2, "maxItems": 4},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)
GRAMMAR = 'start: item (", " item)~3\nitem: /[a-z]{4}/ "=" /[0-9]{3}/'
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "sampled from top_k and top_p": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "sampled with min_p": {"temperature": 1.0, "min_p": 0.05},
    "repetition penalty": {"repetition_penalty": 1.3},
    "presence penalty": {"presence_penalty": 1.5},
    "frequency penalty": {"frequency_penalty": 1.0},
    "both penalties, sampled": {"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": 0.7},
    "logit_bias": {"logit_bias": {260: 4.0, 28: -5.0}},
    "allowed_token_ids, sampled": {"temperature": 1.0, "allowed_token_ids": list(range(200, 400))},
    "min_tokens": {"ignore_eos": False, "min_tokens": TOKENS - 2, "logit_bias": {2: 30.0}},
    "schema": {"ignore_eos": False, "structured_outputs": {"json": SCHEMA}, "max_tokens": 120},
    "schema, sampled": {
        "ignore_eos": False,
        "temperature": 1.0,
        "structured_outputs": {"json": SCHEMA},
        "max_tokens": 120,
    },
    "regular expression, sampled": {
        "ignore_eos": False,
        "temperature": 1.0,
        "structured_outputs": {"regex": "[a-f]{3}(-[a-f]{4}){4}"},
    },
    "choice, sampled": {
        "ignore_eos": False,
        "temperature": 1.0,
        "structured_outputs": {
            "choice": ["the quick brown fox jumps over it", "the quick red hen sits on the nest"],
        },
    },
    "grammar, sampled": {"ignore_eos": False, "temperature": 1.0, "structured_outputs": {"grammar": GRAMMAR}},
    "repetition_detection": {
        "max_tokens": 200,
        "repetition_detection": RepetitionDetectionParams(max_pattern_size=40, min_count=2),
    },
}


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0, **given})


@pytest.fixture(scope="module")
def prompt(workload: list[dict[str, Any]]) -> list[int]:
    tokens: list[int] = workload[3]["prompt_token_ids"][:60]
    return tokens


@pytest.fixture(scope="module")
def resumed(engine: DrivenEngine) -> Callable[..., tuple[Answer, dict[int, Answer]]]:
    """Runs a case whole, and behind its own tokens from several places on."""

    def run(case: Case) -> tuple[Answer, dict[int, Answer]]:
        (whole,) = engine.run([case])
        assert whole.error is None
        length = len(whole.tokens)
        cuts = sorted({1, 2, 5, 11, length // 2, length - 1} & set(range(1, length)))
        assert cuts
        cases = [Case(case.prompt, case.params, case.seed, whole.tokens[:cut], case.bad_words) for cut in cuts]
        return whole, dict(zip(cuts, engine.run(cases), strict=True))

    return run


def assert_goes_on_as_the_whole(whole: Answer, parts: dict[int, Answer]) -> None:
    for cut, part in parts.items():
        assert part.error is None
        assert (cut, part.tokens, part.end) == (cut, whole.tokens[cut:], whole.end)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_cut_request_ends_as_the_whole_one(
    engine: DrivenEngine,
    resumed: Callable[..., tuple[Answer, dict[int, Answer]]],
    prompt: list[int],
    name: str,
) -> None:
    settings = SETTINGS[name]
    if settings.get("temperature") and engine.process.capabilities.exact_resume != "all":
        pytest.skip("this version of vLLM does not resume a seed's draws, and the engine says so")
    assert_goes_on_as_the_whole(*resumed(Case(prompt, params(**settings))))


def test_a_bad_word_that_spans_the_cut_is_not_generated(
    engine: DrivenEngine, resumed: Callable[..., tuple[Answer, dict[int, Answer]]], prompt: list[int]
) -> None:
    (free,) = engine.run([Case(prompt, params())])
    words = [free.tokens[10:13], free.tokens[4:6]]
    whole, parts = resumed(Case(prompt, params(), bad_words=words))
    assert whole.tokens != free.tokens
    assert_goes_on_as_the_whole(whole, parts)


def test_a_stop_token_behind_the_cut_ends_it_and_is_named(
    engine: DrivenEngine, resumed: Callable[..., tuple[Answer, dict[int, Answer]]], prompt: list[int]
) -> None:
    (free,) = engine.run([Case(prompt, params())])
    whole, parts = resumed(Case(prompt, params(stop_token_ids=[free.tokens[25]])))
    assert whole.end == (FinishReason.STOP, free.tokens[25])
    assert_goes_on_as_the_whole(whole, parts)


def test_the_end_of_the_context_is_where_it_was(
    resumed: Callable[..., tuple[Answer, dict[int, Answer]]], workload: list[dict[str, Any]], engine: DrivenEngine
) -> None:
    long = [token for row in workload for token in row["prompt_token_ids"]][: engine.info.max_model_len - 30]
    whole, parts = resumed(Case(long, params(max_tokens=None)))
    assert (len(whole.tokens), whole.finish_reason) == (30, FinishReason.LENGTH)
    assert_goes_on_as_the_whole(whole, parts)


def test_log_probabilities_go_on_and_those_of_the_prompt_come_once(
    resumed: Callable[..., tuple[Answer, dict[int, Answer]]], prompt: list[int]
) -> None:
    whole, parts = resumed(Case(prompt, params(logprobs=3, prompt_logprobs=2)))
    assert whole.prompt_logprobs is not None
    assert len(whole.prompt_logprobs) == len(prompt) - 1
    assert [position[0][0] for position in whole.prompt_logprobs] == prompt[1:]
    assert [position[0][0] for position in whole.logprobs] == whole.tokens
    assert all(len(position) in (3, 4) for position in whole.logprobs)
    assert_goes_on_as_the_whole(whole, parts)
    for cut, part in parts.items():
        assert part.prompt_logprobs is None
        for position, as_whole in zip(part.logprobs, whole.logprobs[cut:], strict=True):
            assert [entry[0] for entry in position] == [entry[0] for entry in as_whole]
            assert [entry[1] for entry in position] == pytest.approx([entry[1] for entry in as_whole], abs=1e-3)


def test_a_request_that_was_complete_is_answered_without_a_step(engine: DrivenEngine, prompt: list[int]) -> None:
    (whole,) = engine.run([Case(prompt, params(max_tokens=5))])
    (again,) = engine.run([Case(prompt, params(max_tokens=5), emitted=whole.tokens)])
    assert (again.tokens, again.end) == ([], whole.end)


def test_long_prompts_with_seeds_are_computed_in_parts_and_draw_the_same(
    options: dict[str, Any], workload: list[dict[str, Any]]
) -> None:
    """vLLM's old runner ends the engine here on a CPU, were it left as it is."""
    prompts = [row["prompt_token_ids"][:100] for row in workload if row["prompt_len"] >= 100][:4]
    cases = [Case(prompt, params(temperature=1.0, max_tokens=12)) for prompt in prompts]
    engine = DrivenEngine(**options, max_num_batched_tokens=32, max_num_seqs=4)
    try:
        exact = engine.process.capabilities.exact_resume == "all"
        together, alone = engine.run(cases), [engine.run([case])[0] for case in cases]
        resumed = engine.run(
            [Case(a.prompt, a.params, emitted=b.tokens[:5]) for a, b in zip(cases, alone, strict=True)]
        )
    finally:
        engine.close()
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    if exact:
        assert [answer.tokens for answer in resumed] == [answer.tokens[5:] for answer in alone]
