"""A library accepts every sampling parameter that a service accepts, and refuses the others except for those listed."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from headrace_engine.errors import InvalidRequestError
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_wire.sampling import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_TEMPERATURE,
    IN_LIBRARY,
    SAMPLING,
    as_sent,
    sampling_problems,
)
from unit.wire.test_sampling import ACCEPTED, REFUSED

CHOSEN_BY_THE_WORKER = {"output_kind"}
"""A stream is made of deltas."""
ONLY_THE_LIBRARY_ACCEPTS: dict[str, list[Any]] = {
    # A library has its own max_logprobs; a service has one for all.
    "logprobs": [-1, 21, True],
    "prompt_logprobs": [-1, 21, True],
    # Sizes that would cost other tenants of a worker.
    "stop_token_ids": [[0] * 1025],
    "logit_bias": [dict.fromkeys(range(1025), 1)],
    "extra_args": [{str(number): 0 for number in range(65)}],
}
"""Of what a service refuses."""


def refusals(values: dict[str, Any]) -> list[str]:
    try:
        SamplingParams.from_dict(values)
    except InvalidRequestError as error:
        return error.problems
    return []


def test_the_library_has_a_rule_for_every_parameter() -> None:
    assert {f.name for f in fields(SamplingParams)} - CHOSEN_BY_THE_WORKER == set(SAMPLING) == set(IN_LIBRARY)


def test_the_defaults_are_those_of_the_library() -> None:
    defaults = SamplingParams()
    assert defaults.max_tokens == DEFAULT_MAX_TOKENS
    assert defaults.temperature == DEFAULT_TEMPERATURE


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ACCEPTED.items() for value in values])
def test_the_library_accepts_what_a_service_accepts(name: str, value: Any) -> None:
    assert refusals(as_sent({name: value})) == []


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_the_library_refuses_what_a_service_refuses_except_for_what_is_listed(name: str, value: Any) -> None:
    is_accepted = value in ONLY_THE_LIBRARY_ACCEPTS.get(name, [])
    assert (refusals({name: value}) == []) == is_accepted


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
def test_both_refuse_parameters_that_contradict_each_other(values: dict[str, Any]) -> None:
    assert sampling_problems(values)
    assert refusals(values)
