"""SamplingParams: what is refused, in which words, and what survives the wire."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.errors import InvalidRequestError
from headrace_engine.requests.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("n", 0, "n must be at least 1 and at most 64, got 0"),
        ("n", 65, "n must be at least 1 and at most 64, got 65"),
        ("n", True, "n must be an integer, got true"),
        ("temperature", -0.1, "temperature must be at least 0, got -0.1"),
        ("temperature", math.nan, "temperature must be a finite number, got nan"),
        ("temperature", math.inf, "temperature must be a finite number, got inf"),
        pytest.param("temperature", 10**400, "temperature must be a finite number, got 1000", id="huge integer"),
        ("temperature", "1", "temperature must be a finite number, got a string of length 1"),
        ("temperature", None, "temperature must be a finite number, got null"),
        ("top_p", 0.0, "top_p must be above 0 and at most 1, got 0.0"),
        ("top_p", 1.1, "top_p must be above 0 and at most 1, got 1.1"),
        ("top_k", -2, "top_k must be at least -1 and at most 2147483647, got -2"),
        ("top_k", 1.0, "top_k must be an integer, got 1.0"),
        ("min_p", 1.5, "min_p must be at least 0 and at most 1, got 1.5"),
        ("seed", 2**63, f"seed must be at least {-(2**63)} and at most {2**63 - 1}, got {2**63}"),
        ("seed", "x", "seed must be an integer, got a string of length 1"),
        ("max_tokens", 0, "max_tokens must be at least 1 and at most 2147483647, got 0"),
        ("min_tokens", -1, "min_tokens must be at least 0 and at most 2147483647, got -1"),
        ("min_tokens", 17, "min_tokens must be at most max_tokens (16), got 17"),
        ("presence_penalty", 2.1, "presence_penalty must be at least -2 and at most 2, got 2.1"),
        ("frequency_penalty", -2.1, "frequency_penalty must be at least -2 and at most 2, got -2.1"),
        ("repetition_penalty", 0.0, "repetition_penalty must be above 0, got 0.0"),
        ("logprobs", -2, "logprobs must be at least -1 and at most 2147483647, got -2"),
        ("prompt_logprobs", -2, "prompt_logprobs must be at least -1 and at most 2147483647, got -2"),
        ("stream_interval", 0, "stream_interval must be at least 1 and at most 2147483647, got 0"),
        ("logit_bias", [1], "logit_bias must be a map from token ids to numbers, got a list"),
        ("logit_bias", {"x": 1}, "logit_bias must have token ids from 0 to 2147483647 as keys, got 'x'"),
        ("logit_bias", {-1: 1}, "logit_bias must have token ids from 0 to 2147483647 as keys, got -1"),
        ("logit_bias", {7: 101}, "logit_bias.7 must be at least -100 and at most 100, got 101"),
        ("logit_bias", {7: None}, "logit_bias.7 must be a finite number, got null"),
        ("allowed_token_ids", [], "allowed_token_ids must hold at least 1 token ids, got 0"),
        ("allowed_token_ids", [-1], "allowed_token_ids[0] must be at least 0 and at most 2147483647, got -1"),
        ("bad_words", [""], "bad_words[0] must be a string of 1 to 256 characters, got 0"),
        ("bad_words", ["a"] * 257, "bad_words must hold at most 256 strings, got 257"),
        ("bad_words", [3], "bad_words[0] must be a string, got 3"),
        ("repetition_detection", 3, "repetition_detection must be a map of max_pattern_size, min_pattern_size"),
        (
            "repetition_detection",
            {"size": 3},
            "must hold only max_pattern_size, min_pattern_size, min_count, got 'size'",
        ),
        (
            "repetition_detection",
            {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
            "repetition_detection.min_pattern_size must be at most max_pattern_size (2), got 3",
        ),
        (
            "repetition_detection",
            {"max_pattern_size": 2, "min_count": 1},
            "repetition_detection.min_count must be at least 2, got 1",
        ),
        (
            "repetition_detection",
            {"max_pattern_size": 1025, "min_count": 2},
            "repetition_detection.max_pattern_size must be at least 0 and at most 1024, got 1025",
        ),
        ("extra_args", [1], "extra_args must be a map from names to values, got a list"),
        ("extra_args", {1: 2}, "extra_args must hold only maps with string keys"),
        ("detokenize", 1, "detokenize must be true or false, got 1"),
        ("spaces_between_special_tokens", None, "spaces_between_special_tokens must be true or false, got null"),
        ("stop", ["x"] * 17, "stop must hold at most 16 strings, got 17"),
        ("stop", [""], "stop[0] must be a string of 1 to 256 characters, got 0"),
        ("stop", ["x" * 257], "stop[0] must be a string of 1 to 256 characters, got 257"),
        ("stop", [1], "stop[0] must be a string, got 1"),
        ("stop", 5, "stop must be a string or a list of strings, got 5"),
        ("stop_token_ids", [-1], "stop_token_ids[0] must be at least 0 and at most 2147483647, got -1"),
        ("stop", "a\ud800", "stop[0] must be valid Unicode text, got a lone surrogate"),
        ("bad_words", ["\udfff"], "bad_words[0] must be valid Unicode text, got a lone surrogate"),
        pytest.param("max_tokens", 2**63, f"must be at least 1 and at most {2**31 - 1}", id="beyond 64 bits"),
        pytest.param("min_tokens", 10**5000, "got an integer of thousands of digits", id="beyond what is printed"),
        pytest.param("seed", -(10**5000), "got an integer of thousands of digits", id="below what is printed"),
        pytest.param(
            "logit_bias",
            {"9" * 5000: 1},
            "logit_bias must have token ids from 0 to 2147483647 as keys",
            id="more digits than are read",
        ),
        (
            "stop_token_ids",
            [2**64],
            "stop_token_ids[0] must be at least 0 and at most 2147483647, got 18446744073709551616",
        ),
        ("stop_token_ids", np.array([1.5]), "stop_token_ids[0] must be an integer, got 1.5"),
        ("extra_args", {"a": 2**64}, f"extra_args must hold integers of 64 bits, got {2**64}: send it as a string"),
        (
            "extra_args",
            {"a": [-(2**63) - 1]},
            "extra_args must hold integers of 64 bits, got -9223372036854775809: send it as a string",
        ),
        (
            "extra_args",
            {"a": {"b": object}},
            "extra_args must hold only numbers, strings, lists and maps, got a value of type type",
        ),
        ("extra_args", {"a": {1: 2}}, "extra_args must hold only maps with string keys"),
        ("extra_args", {"a": "\ud800"}, "extra_args must hold valid Unicode text, got a lone surrogate"),
        ("output_kind", "everything", "output_kind must be one of cumulative, delta, final_only, got 'everything'"),
        ("stop_token_ids", 3, "stop_token_ids must be a list of token ids, got 3"),
        ("ignore_eos", 1, "ignore_eos must be true or false, got 1"),
    ],
)
def test_a_wrong_value_is_refused_with_the_value_and_the_limit(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(**{name: value})
    (problem,) = refused.value.problems
    assert sentence in problem
    assert len(problem) < 1000


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(n=0, top_p=2.0, logprobs=-9, stop=[""])
    assert [problem.split()[0] for problem in refused.value.problems] == ["n", "top_p", "stop[0]", "logprobs"]


def test_stop_strings_without_text_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="stop must be absent when detokenize is false"):
        SamplingParams(stop="x", detokenize=False)


def test_several_greedy_choices_would_be_the_same_and_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="n must be 1 when temperature is 0, got 2"):
        SamplingParams(n=2, temperature=0)


def test_short_forms_are_accepted() -> None:
    params = SamplingParams(stop="end", top_k=-1, temperature=1)
    assert (params.stop, params.top_k) == (["end"], 0)
    assert SamplingParams.from_dict({"logit_bias": {"7": 1, 8: 2}}).logit_bias == {7: 1, 8: 2}
    assert SamplingParams(bad_words="no").bad_words == ["no"]  # type: ignore[arg-type]
    detection: Any = {"max_pattern_size": 4, "min_count": 3}
    assert SamplingParams(repetition_detection=detection).repetition_detection == RepetitionDetectionParams(
        max_pattern_size=4, min_pattern_size=0, min_count=3
    )
    nothing: Any = None
    assert SamplingParams(stop=nothing, stop_token_ids=nothing).stop_token_ids == []


@pytest.mark.parametrize("number", [np.int8, np.int64, np.uint32, np.array], ids=lambda kind: kind.__name__)
def test_numbers_of_numpy_are_taken_as_pythons(number: Callable[[Any], Any]) -> None:
    given: Any = {name: number(1) for name in ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs")}
    given |= {"logit_bias": {np.int64(7): np.float32(0.5)}, "extra_args": {"a": [number(1)]}}
    params = SamplingParams(**given, temperature=np.float32(0.5), ignore_eos=np.bool_(True))  # type: ignore[arg-type]
    assert params == SamplingParams(
        n=1,
        top_k=1,
        seed=1,
        max_tokens=1,
        min_tokens=1,
        logprobs=1,
        logit_bias={7: 0.5},
        extra_args={"a": [1]},
        temperature=0.5,
        ignore_eos=True,
    )
    assert SamplingParams.from_dict(msgpack.unpackb(msgpack.packb(params.to_dict()))) == params


@pytest.mark.parametrize("array", [np.array, tuple], ids=lambda kind: kind.__name__)
def test_token_ids_may_come_as_an_array(array: Callable[[Any], Any]) -> None:
    params = SamplingParams(stop_token_ids=array([3, 4]), allowed_token_ids=array([3, 5]))
    assert (params.stop_token_ids, params.allowed_token_ids) == ([3, 4], [3, 5])
    assert msgpack.packb(params.to_dict())


def test_log_probabilities_asked_for_by_true_are_those_of_one_more_token() -> None:
    params = SamplingParams(logprobs=True, prompt_logprobs=True)
    assert (params.logprobs, params.prompt_logprobs) == (1, 1)
    assert type(params.logprobs) is type(params.prompt_logprobs) is int


def test_none_means_the_default_where_it_is_said_to() -> None:
    given: Any = dict.fromkeys(field.name for field in fields(SamplingParams))
    assert SamplingParams.from_optional(**given) == SamplingParams(max_tokens=None)
    assert SamplingParams.from_optional(temperature=0.5, seed=None) == SamplingParams(temperature=0.5)


def test_a_clone_shares_nothing() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, structured_outputs={"choice": ["x"]})  # type: ignore[arg-type]
    clone = params.clone()
    assert clone == params
    clone.stop.append("b")
    assert clone.structured_outputs is not None
    clone.structured_outputs.choice = ["y"]
    assert (params.stop, params.structured_outputs.choice) == (["a"], ["x"])  # type: ignore[union-attr]


def test_unknown_names_are_refused_by_name() -> None:
    with pytest.raises(
        InvalidRequestError, match="unknown sampling parameter 'temprature'; unknown sampling parameter 'best_of'"
    ):
        SamplingParams.from_dict({"temprature": 1, "best_of": 2})


@pytest.mark.parametrize("kind", ["everything", 3, [], None])
def test_an_unknown_output_kind_is_refused(kind: Any) -> None:
    with pytest.raises(InvalidRequestError, match="output_kind must be one of cumulative, delta, final_only, got"):
        SamplingParams.from_dict({"output_kind": kind})


def test_below_a_tiny_temperature_sampling_is_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy


@given(
    st.builds(
        SamplingParams,
        n=st.integers(1, 64),
        temperature=st.floats(0.01, 5),
        top_p=st.floats(0.01, 1),
        top_k=st.integers(-1, 100),
        min_p=st.floats(0, 1),
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
        stop=st.lists(st.text(min_size=1, max_size=5), max_size=3),
        stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3),
        max_tokens=st.none() | st.integers(10, 100),
        min_tokens=st.integers(0, 10),
        logprobs=st.none() | st.integers(0, 20),
        prompt_logprobs=st.none() | st.integers(-1, 20),
        ignore_eos=st.booleans(),
        detokenize=st.just(True),
        spaces_between_special_tokens=st.booleans(),
        stream_interval=st.none() | st.integers(1, 50),
        logit_bias=st.none() | st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=3),
        allowed_token_ids=st.none() | st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3),
        bad_words=st.lists(st.text(min_size=1, max_size=5), max_size=3),
        repetition_detection=st.none()
        | st.builds(
            RepetitionDetectionParams,
            max_pattern_size=st.integers(4, 9),
            min_pattern_size=st.integers(0, 4),
            min_count=st.integers(2, 5),
        ),
        extra_args=st.none() | st.dictionaries(st.text(max_size=3), st.integers(-5, 5), max_size=2),
        output_kind=st.sampled_from(RequestOutputKind),
    )
)
def test_parameters_survive_the_wire(params: SamplingParams) -> None:
    sent = msgpack.unpackb(msgpack.packb(params.to_dict()))
    assert SamplingParams.from_dict(sent) == params
    assert SamplingParams.from_wire(sent) == params


def test_parameters_that_another_process_has_checked_are_not_checked_again() -> None:
    assert SamplingParams.from_wire({**SamplingParams().to_dict(), "temperature": -1.0}).temperature == -1.0
