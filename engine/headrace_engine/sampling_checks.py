"""Checks the values of `SamplingParams`. Each check returns one message for each problem.

Keep it consistent with `headrace_broker.sampling_rules`, which checks requests of producers without the engine.
"""

import math
import sys
from collections.abc import Mapping
from typing import Any

from headrace_engine.plain_values import data_problem, is_unicode, shown

MAX_N = 64
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_LOGIT_BIAS = 100.0
MAX_PATTERN_SIZE = 1024

_LARGEST_INTEGER = 2**63 - 1
_SIGNED_64_BITS = (-(2**63), _LARGEST_INTEGER)


def value_problems(params: Any) -> list[str]:
    """Return all problems of `SamplingParams`: first those of single values, then those of combinations."""
    problems = [
        *number("temperature", params.temperature, 0.0, math.inf),
        *number("top_p", params.top_p, 0.0, 1.0, above=True),
        *number("min_p", params.min_p, 0.0, 1.0),
        *number("presence_penalty", params.presence_penalty, -2.0, 2.0),
        *number("frequency_penalty", params.frequency_penalty, -2.0, 2.0),
        *number("repetition_penalty", params.repetition_penalty, 0.0, math.inf, above=True),
        *integer("n", params.n, 1, MAX_N),
        *integer("top_k", params.top_k, 0, None),
        *integer("min_tokens", params.min_tokens, 0, None),
    ]
    for name, low, high in (
        ("max_tokens", 1, None),
        ("logprobs", -1, None),
        ("prompt_logprobs", -1, None),
        ("stream_interval", 1, None),
        ("seed", *_SIGNED_64_BITS),
    ):
        value = getattr(params, name)
        if value is not None:
            problems += integer(name, value, low, high)
    problems += flags(params, "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens")
    problems += flags(params, "include_stop_str_in_output", "detokenize")
    problems += texts("stop", "stop string", params.stop, MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS)
    problems += texts("bad_words", "bad word", params.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
    problems += _token_ids("stop_token_ids", params.stop_token_ids)
    if params.allowed_token_ids is not None:
        problems += _token_ids("allowed_token_ids", params.allowed_token_ids)
    if params.logit_bias is not None:
        problems += _logit_bias(params.logit_bias)
    if params.extra_args is not None:
        problems += _extra_args(params.extra_args)
    return problems or _contradictions(params)


def _contradictions(params: Any) -> list[str]:
    problems: list[str] = []
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        problems.append(f"min_tokens is {params.min_tokens}, more than max_tokens, which is {params.max_tokens}")
    if params.n > 1 and params.is_greedy:
        problems.append(
            f"n is {params.n} but temperature is 0: all choices would be the same; set n=1 or a temperature"
        )
    if params.stop and not params.detokenize:
        problems.append("stop strings are found in text: set detokenize=True, or use stop_token_ids")
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        problems.append("allowed_token_ids is empty, so no token could be generated; leave it out to allow all")
    return problems


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token_id(value: Any) -> bool:
    return is_integer(value) and 0 <= value <= _LARGEST_INTEGER


def flags(params: object, *names: str) -> list[str]:
    values = {name: getattr(params, name) for name in names}
    return [
        f"{name} is {shown(value)}, expected true or false" for name, value in values.items() if type(value) is not bool
    ]


def number(name: str, value: object, low: float, high: float, *, above: bool = False) -> list[str]:
    largest = sys.float_info.max  # Python's integers can be larger
    if not isinstance(value, int | float) or isinstance(value, bool) or not -largest <= value <= largest:
        return [f"{name} is {shown(value)}, expected a finite number"]
    if value < low or value > high or (above and value == low):
        least = f"above {low:g}" if above else f"at least {low:g}"
        most = "" if high == math.inf else f" and at most {high:g}"
        return [f"{name} is {value:g}, must be {least}{most}"]
    return []


def integer(name: str, value: object, low: int, high: int | None) -> list[str]:
    if not is_integer(value):
        return [f"{name} is {shown(value)}, expected an integer"]
    assert isinstance(value, int)
    if high is None and value > _LARGEST_INTEGER:
        high = _LARGEST_INTEGER
    if value < low or (high is not None and value > high):
        return [f"{name} is {shown(value)}, must be at least {low}" + ("" if high is None else f" and at most {high}")]
    return []


def texts(name: str, noun: str, values: object, most: int, most_chars: int) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return [f"{name} must be a string or a list of strings"]
    problems = []
    if len(values) > most:
        problems.append(f"{name} holds {len(values)} strings, the limit is {most}")
    if any(not 1 <= len(value) <= most_chars for value in values):
        problems.append(f"every {noun} must have 1 to {most_chars} characters")
    if not all(is_unicode(value) for value in values):
        problems.append(f"{name} holds text that is no valid Unicode: it has a lone surrogate")
    return problems


def _token_ids(name: str, values: object) -> list[str]:
    if not isinstance(values, list) or not all(_is_token_id(value) for value in values):
        return [f"{name} must be a list of token ids (integers from 0)"]
    return []


def _logit_bias(bias: object) -> list[str]:
    if not isinstance(bias, dict) or not all(_is_token_id(token_id) for token_id in bias):
        return ["logit_bias must be a map from token ids (integers from 0) to numbers"]
    for token_id, value in bias.items():
        problems = number(f"logit_bias of token {token_id}", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if problems:
            return problems
    return []


def _extra_args(value: object) -> list[str]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return ["extra_args must be a map from names to values"]
    problem = data_problem("extra_args", value)
    return [problem] if problem else []


def pattern_problems(params: Any) -> list[str]:
    """Return the problems of `RepetitionDetectionParams`."""
    sizes = [
        *integer("repetition_detection.max_pattern_size", params.max_pattern_size, 0, MAX_PATTERN_SIZE),
        *integer("repetition_detection.min_pattern_size", params.min_pattern_size, 0, None),
        *integer("repetition_detection.min_count", params.min_count, 0, None),
    ]
    if sizes:
        return sizes
    problems = []
    if params.min_pattern_size > params.max_pattern_size:
        problems.append(
            f"repetition_detection.min_pattern_size is {params.min_pattern_size}, more than max_pattern_size, "
            f"which is {params.max_pattern_size}"
        )
    if params.max_pattern_size > 0 and params.min_count < 2:
        problems.append(f"repetition_detection.min_count is {params.min_count}, must be at least 2")
    return problems
