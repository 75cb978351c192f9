"""The limits of every sampling parameter, at their edges."""

import math
from typing import Any

import pytest

from headrace_wire.sampling import SAMPLING, as_sent, sampling_problems

ACCEPTED: dict[str, list[Any]] = {
    "n": [1, 64],
    "temperature": [0, 0.0, 1, 100.5],
    "top_p": [1e-9, 1, 1.0],
    "top_k": [-1, 0, 50],
    "min_p": [0, 0.5, 1],
    "seed": [None, 0, -(2**63), 2**63 - 1],
    "max_tokens": [1, 2**31 - 1],
    "min_tokens": [0, 16],
    "stop": [None, "x", [], ["a"] * 16, ["x" * 256], ("a", "b")],
    "stop_token_ids": [None, [], [0, 2**31 - 1], (1, 2)],
    "ignore_eos": [True, False],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20],
    "logprob_token_ids": [None, [0], list(range(128))],
    "logit_bias": [None, {}, {5: 100, "6": -100.0}, {2**31 - 1: 0.5}],
    "allowed_token_ids": [None, [0], (1, 2**31 - 1)],
    "bad_words": [None, "x", [], ["a"] * 256, ["x" * 256]],
    "repetition_detection": [
        None,
        {},
        {"max_pattern_size": 1024, "min_pattern_size": 1024, "min_count": 2},
        {"max_pattern_size": 3, "min_count": 9},
    ],
    "detokenize": [True, False],
    "spaces_between_special_tokens": [True, False],
    "stream_interval": [None, 1, 1000],
    "extra_args": [None, {}, {"anything": [1, {"a": None}]}],
    "presence_penalty": [-2, 0.0, 2],
    "frequency_penalty": [-2.0, 2],
    "repetition_penalty": [1e-9, 2, 5.5],
    "skip_special_tokens": [True, False],
    "include_stop_str_in_output": [True, False],
    "structured_outputs": [
        None,
        {"json": {"type": "object"}},
        {"json": '{"type": "object"}', "disable_any_whitespace": True, "regex": None},
        {"json_object": True, "whitespace_pattern": " ?"},
        {"regex": "a" * 65536},
        {"choice": ["a"] * 1024},
        {"choice": ("a", "b")},
        {"grammar": 'start: "a"'},
    ],
}
REFUSED: dict[str, list[Any]] = {
    "n": [0, 65, 1.0, True, "1"],
    "temperature": [-0.1, math.inf, math.nan, "1", True],
    "top_p": [0, 1.1, math.nan],
    "top_k": [-2, 1.5],
    "min_p": [-0.1, 1.1],
    "seed": [2**63, -(2**63) - 1, 1.5, "1"],
    "max_tokens": [0, -1, 2.0, 2**31],
    "min_tokens": [-1],
    "stop": ["", [""], ["a"] * 17, ["x" * 257], [1], 5, {"a": 1}, "\ud800"],
    "stop_token_ids": [[-1], [2**31], ["1"], 5, [0] * 1025],
    "ignore_eos": [0, 1, "true"],
    "logprobs": [-1, 21, True],
    "presence_penalty": [-2.1, 2.1, math.nan],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1, math.inf],
    "prompt_logprobs": [-1, 21, True],
    "logprob_token_ids": [[], [-1], [True], list(range(129)), 3],
    "logit_bias": [
        [1],
        {"x": 1},
        {-1: 1},
        {2**31: 1},
        {1: 100.5},
        {1: math.nan},
        {1: "1"},
        dict.fromkeys(range(1025), 1),
    ],
    "allowed_token_ids": [[], [-1], "12", [True]],
    "bad_words": ["", [""], ["a"] * 257, ["x" * 257], [1], "\ud800"],
    "repetition_detection": [
        5,
        {"size": 1},
        {"max_pattern_size": 1025, "min_count": 2},
        {"max_pattern_size": 2},
        {"max_pattern_size": 2, "min_count": 1},
        {"min_pattern_size": 1},
        {"min_count": 1.5},
    ],
    "detokenize": [0],
    "spaces_between_special_tokens": ["yes"],
    "stream_interval": [0, 1.5, True],
    "extra_args": [
        [],
        {1: 2},
        {str(number): 0 for number in range(65)},
        {"a": 2**64},
        {"a": [-(2**63) - 1]},
        {"a": "\ud800"},
        {"a": {1: 2}},
        {"a": object},
    ],
    "skip_special_tokens": [1],
    "include_stop_str_in_output": ["yes"],
    "structured_outputs": [
        "json",
        {},
        {"regex": None},
        {"regex": "a", "choice": ["a"]},
        {"structural_tag": "a", "regex": "a"},
        {"json_object": False},
        {"json": 5},
        {"json": ""},
        {"json": "{"},
        {"json": "[]"},
        {"choice": ["a\0"]},
        {"json": {"a": b"b"}},
        {"json": {"a": math.nan}},
        {"json": {"description": "x" * 65536}},
        {"regex": "\ud800"},
        {"regex": "a" * 65537},
        {"choice": []},
        {"choice": ["a", ""]},
        {"choice": ["a"] * 1025},
        {"choice": ["a" * 65536, "b"]},
        {"regex": "a", "disable_any_whitespace": True},
        {"json": {}, "disable_any_whitespace": 1},
        {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "},
        {"json": {}, "whitespace_pattern": ""},
    ],
}


def test_every_parameter_is_tested_at_its_limits() -> None:
    assert ACCEPTED.keys() == REFUSED.keys() == SAMPLING.keys()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ACCEPTED.items() for value in values])
def test_a_value_inside_the_limits_is_accepted(name: str, value: Any) -> None:
    assert sampling_problems({name: value}) == []


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_a_value_outside_the_limits_is_refused_by_name(name: str, value: Any) -> None:
    (problem,) = sampling_problems({name: value})
    assert problem.startswith(name)
    assert " must " in problem


def test_an_unknown_parameter_is_refused_by_name() -> None:
    assert sampling_problems({"temprature": 1}) == ["unknown sampling parameter 'temprature'"]


def test_min_tokens_may_not_exceed_max_tokens_or_its_default() -> None:
    assert sampling_problems({"min_tokens": 17, "max_tokens": 17}) == []
    assert sampling_problems({"min_tokens": 17}) == ["min_tokens must be at most max_tokens (16), got 17"]


def test_several_choices_need_randomness() -> None:
    assert sampling_problems({"n": 2}) == []
    for temperature in (0, 1e-6):
        (problem,) = sampling_problems({"n": 2, "temperature": temperature})
        assert "n must be 1 when temperature is 0" in problem


def test_stop_strings_need_text() -> None:
    assert sampling_problems({"stop": [], "detokenize": False}) == []
    assert sampling_problems({"stop": "x", "detokenize": False}) == [
        "stop must be absent when detokenize is false: use stop_token_ids"
    ]


def test_sent_parameters_have_no_nulls_and_only_string_keys() -> None:
    sent = as_sent({"logit_bias": {5: 1.5, "6": -2}, "seed": None, "top_k": 3})
    assert sent == {"logit_bias": {"5": 1.5, "6": -2}, "top_k": 3}
    assert sampling_problems(sent) == []
