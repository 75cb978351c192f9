"""The two places that check sampling parameters, the producer's and the engine's, say the same."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from headrace_broker import sampling_rules, structured_rules
from headrace_broker.sampling_rules import SAMPLING_RULES, as_sent, sampling_problems
from headrace_engine import sampling_checks, sampling_params, structured_outputs_params
from headrace_engine.errors import InvalidRequestError
from headrace_engine.sampling_params import SamplingParams
from unit.broker.test_sampling_rules import ACCEPTED, REFUSED

CHOSEN_BY_THE_WORKER = {"output_kind"}
"""A stream is made of deltas."""
ONLY_THE_ENGINE_ACCEPTS: dict[str, list[Any]] = {
    # A library has its own max_logprobs; a service has one for all.
    "logprobs": [-1, 21, True],
    "prompt_logprobs": [-1, 21, True],
    # A message is bounded by counts and by the largest token id, an engine by its vocabulary and its context.
    "max_tokens": [2**31],
    "stop_token_ids": [[2**31], [0] * 1025],
    "logit_bias": [{2**31: 1}, dict.fromkeys(range(1025), 1)],
    "extra_args": [{str(number): 0 for number in range(65)}],
}
"""Of what a producer may not send."""


def refusals(values: dict[str, Any]) -> list[str]:
    try:
        SamplingParams.from_dict(values)
    except InvalidRequestError as error:
        return error.problems
    return []


def test_both_know_the_same_parameters() -> None:
    assert {f.name for f in fields(SamplingParams)} - CHOSEN_BY_THE_WORKER == set(SAMPLING_RULES)


def test_both_have_the_same_limits() -> None:
    assert sampling_rules.MAX_STOP_STRINGS == sampling_checks.MAX_STOP_STRINGS
    assert sampling_rules.MAX_STOP_CHARS == sampling_checks.MAX_STOP_STRING_CHARS
    assert sampling_rules.MAX_BAD_WORDS == sampling_checks.MAX_BAD_WORDS
    assert sampling_rules.MAX_BAD_WORD_CHARS == sampling_checks.MAX_BAD_WORD_CHARS
    assert sampling_rules.MAX_LOGIT_BIAS == sampling_checks.MAX_LOGIT_BIAS
    assert sampling_rules.MAX_PATTERN_SIZE == sampling_checks.MAX_PATTERN_SIZE
    assert structured_rules.MAX_GRAMMAR_BYTES == structured_outputs_params.MAX_GRAMMAR_BYTES
    assert structured_rules.MAX_CHOICES == structured_outputs_params.MAX_CHOICES
    assert sampling_rules.GREEDY_TEMPERATURE == sampling_params.GREEDY_TEMPERATURE
    defaults = SamplingParams()
    assert defaults.max_tokens == sampling_rules.DEFAULT_MAX_TOKENS
    assert defaults.temperature == sampling_rules.DEFAULT_TEMPERATURE


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ACCEPTED.items() for value in values])
def test_what_a_producer_may_send_the_engine_accepts(name: str, value: Any) -> None:
    assert refusals(as_sent({name: value})) == []


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_what_a_producer_may_not_send_the_engine_refuses_too_but_for_what_is_listed(name: str, value: Any) -> None:
    accepted_by_engine = value in ONLY_THE_ENGINE_ACCEPTS.get(name, [])
    assert (refusals({name: value}) == []) == accepted_by_engine


@pytest.mark.parametrize(
    "values",
    [
        {"min_tokens": 17},
        {"n": 2, "temperature": 0},
        {"n": 2, "temperature": 9e-6},
        {"stop": "x", "detokenize": False},
        {"temprature": 1},
        {"structure": {}},
    ],
)
def test_both_refuse_what_does_not_fit_together(values: dict[str, Any]) -> None:
    assert sampling_problems(values)
    assert refusals(values)
