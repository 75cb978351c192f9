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
from headrace_engine.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("n", 0, "n is 0, must be at least 1 and at most 64"),
        ("n", 65, "n is 65, must be at least 1 and at most 64"),
        ("n", True, "n is True, expected an integer"),
        ("temperature", -0.1, "temperature is -0.1, must be at least 0"),
        ("temperature", math.nan, "temperature is nan, expected a finite number"),
        ("temperature", math.inf, "temperature is inf, expected a finite number"),
        pytest.param("temperature", 10**400, "expected a finite number", id="huge integer"),
        ("temperature", "1", "temperature is '1', expected a finite number"),
        ("temperature", None, "temperature is None, expected a finite number"),
        ("top_p", 0.0, "top_p is 0, must be above 0 and at most 1"),
        ("top_p", 1.1, "top_p is 1.1, must be above 0 and at most 1"),
        ("top_k", -2, "top_k is -2, must be at least 0"),
        ("top_k", 1.0, "top_k is 1.0, expected an integer"),
        ("min_p", 1.5, "min_p is 1.5, must be at least 0 and at most 1"),
        ("seed", 2**63, f"seed is {2**63}, must be at least {-(2**63)} and at most {2**63 - 1}"),
        ("seed", "x", "seed is 'x', expected an integer"),
        ("max_tokens", 0, "max_tokens is 0, must be at least 1"),
        ("min_tokens", -1, "min_tokens is -1, must be at least 0"),
        ("min_tokens", 17, "min_tokens is 17, more than max_tokens, which is 16"),
        ("presence_penalty", 2.1, "presence_penalty is 2.1, must be at least -2 and at most 2"),
        ("frequency_penalty", -2.1, "frequency_penalty is -2.1, must be at least -2 and at most 2"),
        ("repetition_penalty", 0.0, "repetition_penalty is 0, must be above 0"),
        ("logprobs", -2, "logprobs is -2, must be at least -1"),
        ("prompt_logprobs", -2, "prompt_logprobs is -2, must be at least -1"),
        ("stream_interval", 0, "stream_interval is 0, must be at least 1"),
        ("logit_bias", [1], "logit_bias must be a map from token ids (integers from 0) to numbers"),
        ("logit_bias", {"x": 1}, "logit_bias must be a map from token ids (integers from 0) to numbers"),
        ("logit_bias", {-1: 1}, "logit_bias must be a map from token ids (integers from 0) to numbers"),
        ("logit_bias", {7: 101}, "logit_bias of token 7 is 101, must be at least -100 and at most 100"),
        ("logit_bias", {7: None}, "logit_bias of token 7 is None, expected a finite number"),
        ("allowed_token_ids", [], "allowed_token_ids is empty, so no token could be generated"),
        ("allowed_token_ids", [-1], "allowed_token_ids must be a list of token ids (integers from 0)"),
        ("bad_words", [""], "every bad word must have 1 to 256 characters"),
        ("bad_words", ["a"] * 257, "bad_words holds 257 strings, the limit is 256"),
        ("bad_words", [3], "bad_words must be a string or a list of strings"),
        ("repetition_detection", 3, "repetition_detection must be a map of max_pattern_size, min_pattern_size"),
        ("repetition_detection", {"size": 3}, "repetition_detection.size is not known"),
        (
            "repetition_detection",
            {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
            "repetition_detection.min_pattern_size is 3, more than max_pattern_size, which is 2",
        ),
        (
            "repetition_detection",
            {"max_pattern_size": 2, "min_count": 1},
            "repetition_detection.min_count is 1, must be at least 2",
        ),
        (
            "repetition_detection",
            {"max_pattern_size": 1025, "min_count": 2},
            "repetition_detection.max_pattern_size is 1025, must be at least 0 and at most 1024",
        ),
        ("extra_args", [1], "extra_args must be a map from names to values"),
        ("extra_args", {1: 2}, "extra_args must be a map from names to values"),
        ("detokenize", 1, "detokenize is 1, expected true or false"),
        ("spaces_between_special_tokens", None, "spaces_between_special_tokens is None, expected true or false"),
        ("stop", ["x"] * 17, "stop holds 17 strings, the limit is 16"),
        ("stop", [""], "every stop string must have 1 to 256 characters"),
        ("stop", ["x" * 257], "every stop string must have 1 to 256 characters"),
        ("stop", [1], "stop must be a string or a list of strings"),
        ("stop", 5, "stop must be a string or a list of strings"),
        ("stop_token_ids", [-1], "stop_token_ids must be a list of token ids (integers from 0)"),
        ("stop", "a\ud800", "stop holds text that is no valid Unicode: it has a lone surrogate"),
        ("bad_words", ["\udfff"], "bad_words holds text that is no valid Unicode: it has a lone surrogate"),
        pytest.param("max_tokens", 2**63, f"must be at least 1 and at most {2**63 - 1}", id="beyond 64 bits"),
        pytest.param("min_tokens", 10**5000, "min_tokens is an integer of 16610 bits", id="beyond what is printed"),
        pytest.param("seed", -(10**5000), "seed is an integer of 16610 bits", id="below what is printed"),
        pytest.param("logit_bias", {"9" * 5000: 1}, "must be a map from token ids", id="more digits than are read"),
        ("stop_token_ids", [2**64], "stop_token_ids must be a list of token ids (integers from 0)"),
        ("stop_token_ids", np.array([1.5]), "stop_token_ids must be a list of token ids (integers from 0)"),
        ("extra_args", {"a": 2**64}, f"extra_args holds {2**64}, an integer beyond 64 bits: send it as text"),
        ("extra_args", {"a": [-(2**63) - 1]}, "an integer beyond 64 bits: send it as text"),
        ("extra_args", {"a": {"b": object}}, "extra_args holds a type; numbers, text, lists and maps can be sent"),
        ("extra_args", {"a": {1: 2}}, "extra_args holds a map with a key that is no text"),
        ("extra_args", {"a": "\ud800"}, "extra_args holds text that is no valid Unicode"),
        ("output_kind", "everything", "output_kind is 'everything', allowed are cumulative, delta, final_only"),
        ("stop_token_ids", 3, "stop_token_ids must be a list of token ids (integers from 0)"),
        ("ignore_eos", 1, "ignore_eos is 1, expected true or false"),
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
    assert [problem.split()[0] for problem in refused.value.problems] == ["top_p", "n", "logprobs", "every"]


def test_stop_strings_without_text_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="set detokenize=True, or use stop_token_ids"):
        SamplingParams(stop="x", detokenize=False)


def test_several_greedy_choices_would_be_the_same_and_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="n is 2 but temperature is 0"):
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
    with pytest.raises(InvalidRequestError, match=r"'best_of' is not known; .*'temprature'"):
        SamplingParams.from_dict({"temprature": 1, "best_of": 2})


@pytest.mark.parametrize("kind", ["everything", 3, [], None])
def test_an_unknown_output_kind_is_refused(kind: Any) -> None:
    with pytest.raises(InvalidRequestError, match="allowed are cumulative, delta, final_only"):
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
        stop_token_ids=st.lists(st.integers(0, 2**31), max_size=3),
        max_tokens=st.none() | st.integers(10, 100),
        min_tokens=st.integers(0, 10),
        logprobs=st.none() | st.integers(0, 20),
        prompt_logprobs=st.none() | st.integers(-1, 20),
        ignore_eos=st.booleans(),
        detokenize=st.just(True),
        spaces_between_special_tokens=st.booleans(),
        stream_interval=st.none() | st.integers(1, 50),
        logit_bias=st.none() | st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100), max_size=3),
        allowed_token_ids=st.none() | st.lists(st.integers(0, 2**31), min_size=1, max_size=3),
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
