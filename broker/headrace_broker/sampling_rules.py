"""The sampling parameters of a message: one table of names, types and ranges.

The engine has its own rules (`headrace_engine.sampling_checks`) for use without a queue. It accepts every value that is
accepted here. Some limits are tighter here, because tenants share a worker.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from headrace_broker.structured_rules import structured_outputs_problem
from headrace_broker.value_rules import data_problem, is_integer, is_number, is_unicode, shown

MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 1024
MAX_BAD_WORDS: Final = 256
MAX_BAD_WORD_CHARS: Final = 256
MAX_ALLOWED_TOKEN_IDS: Final = 2**18
MAX_BIASED_TOKENS: Final = 1024
MAX_LOGIT_BIAS: Final = 100
MAX_LOGPROBS: Final = 20
MAX_PATTERN_SIZE: Final = 1024
MAX_EXTRA_ARGS: Final = 64
MAX_TOKEN_ID: Final = 2**31 - 1

DEFAULT_MAX_TOKENS: Final = 16
DEFAULT_TEMPERATURE: Final = 1.0
GREEDY_TEMPERATURE: Final = 1e-5
"""Below it, decoding is greedy."""

Rule: TypeAlias = Callable[[Any], str | None]
"""Returns the problem of a value, such as `must be ..., not ...`, or None if it is valid."""


def _integer(low: int, high: int) -> Rule:
    def rule(value: Any) -> str | None:
        if is_integer(value) and low <= value <= high:
            return None
        return f"must be an integer from {low} to {high}, not {shown(value)}"

    return rule


def _number(low: float, high: float = math.inf, *, above: bool = False) -> Rule:
    def rule(value: Any) -> str | None:
        if is_number(value) and value <= high and (value > low if above else value >= low):
            return None
        lower = f"above {low:g}" if above else f"at least {low:g}"
        upper = f" and at most {high:g}" if math.isfinite(high) else " and finite"
        return f"must be a number {lower}{upper}, not {shown(value)}"

    return rule


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else f"must be true or false, not {shown(value)}"


def _strings(max_count: int, max_chars: int) -> Rule:
    def rule(value: Any) -> str | None:
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, (list, tuple)):
            return f"must be a string or a list of strings, not {shown(value)}"
        if len(strings) > max_count:
            return f"must hold at most {max_count} strings, not {len(strings)}"
        for string in strings:
            if not isinstance(string, str) or not 1 <= len(string) <= max_chars:
                return f"must hold strings of 1 to {max_chars} characters, not {shown(string)}"
            if not is_unicode(string):
                return "must hold valid Unicode text, without lone surrogates"
        return None

    return rule


def _token_ids(max_count: int, *, min_count: int = 0) -> Rule:
    def rule(value: Any) -> str | None:
        if not isinstance(value, (list, tuple)):
            return f"must be a list of token ids, not {shown(value)}"
        if not min_count <= len(value) <= max_count:
            return f"must hold {f'{min_count} to' if min_count else 'at most'} {max_count} token ids, not {len(value)}"
        return token_id_problem(value)

    return rule


def _logit_bias(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        return f"must be a map from token ids to numbers, not {shown(value)}"
    if len(value) > MAX_BIASED_TOKENS:
        return f"must hold at most {MAX_BIASED_TOKENS} tokens, not {len(value)}"
    for key, bias in value.items():
        token_id = int(key) if isinstance(key, str) and key.isdecimal() and len(key) <= 10 else key
        if not is_integer(token_id) or not 0 <= token_id <= MAX_TOKEN_ID:
            return f"must have token ids from 0 to {MAX_TOKEN_ID} as keys, as numbers or in digits, not {shown(key)}"
        if not is_number(bias) or not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            return f"must be from -{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS} for token {token_id}, not {shown(bias)}"
    return None


_PATTERN_RULES: Final[Mapping[str, Rule]] = {
    "max_pattern_size": _integer(0, MAX_PATTERN_SIZE),
    "min_pattern_size": _integer(0, MAX_PATTERN_SIZE),
    "min_count": _integer(0, MAX_TOKEN_ID),
}


def _repetition_detection(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        return f"must be a map of {', '.join(_PATTERN_RULES)}, not {shown(value)}"
    for name, number in value.items():
        if name not in _PATTERN_RULES:
            return f"must hold only {', '.join(_PATTERN_RULES)}, not {str(name)[:40]!r}"
        if complaint := _PATTERN_RULES[name](number):
            return f"must hold a {name} that {complaint}"
    longest, shortest = value.get("max_pattern_size", 0), value.get("min_pattern_size", 0)
    if shortest > longest:
        return f"must have a min_pattern_size of at most max_pattern_size ({longest}), not {shortest}"
    if longest > 0 and value.get("min_count", 0) < 2:
        return f"must have a min_count of at least 2, not {value.get('min_count', 0)}"
    return None


def _extra_args(value: Any) -> str | None:
    """Check the size only. The worker knows the supported names and refuses the others."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return f"must be a map from names to values, not {shown(value)}"
    if len(value) > MAX_EXTRA_ARGS:
        return f"must hold at most {MAX_EXTRA_ARGS} values, not {len(value)}"
    problem = data_problem("extra_args", value)
    return problem and problem.removeprefix("extra_args ")


def token_id_problem(token_ids: list[Any] | tuple[Any, ...]) -> str | None:
    """Return the problem of the first invalid token id, or None."""
    for position, token_id in enumerate(token_ids):
        if not is_integer(token_id) or not 0 <= token_id <= MAX_TOKEN_ID:
            return f"must hold integers from 0 to {MAX_TOKEN_ID}, not {shown(token_id)} at position {position}"
    return None


SAMPLING_RULES: Final[Mapping[str, Rule]] = {
    "n": _integer(1, 64),
    "temperature": _number(0),
    "top_p": _number(0, 1, above=True),
    "top_k": _integer(-1, MAX_TOKEN_ID),  # 0 and -1 switch it off
    "min_p": _number(0, 1),
    "seed": _integer(-(2**63), 2**63 - 1),
    "max_tokens": _integer(1, MAX_TOKEN_ID),
    "min_tokens": _integer(0, MAX_TOKEN_ID),
    "stop": _strings(MAX_STOP_STRINGS, MAX_STOP_CHARS),
    "stop_token_ids": _token_ids(MAX_STOP_TOKEN_IDS),
    "ignore_eos": _boolean,
    "logprobs": _integer(0, MAX_LOGPROBS),
    "prompt_logprobs": _integer(0, MAX_LOGPROBS),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0, above=True),
    "logit_bias": _logit_bias,
    "allowed_token_ids": _token_ids(MAX_ALLOWED_TOKEN_IDS, min_count=1),
    "bad_words": _strings(MAX_BAD_WORDS, MAX_BAD_WORD_CHARS),
    "repetition_detection": _repetition_detection,
    "detokenize": _boolean,
    "skip_special_tokens": _boolean,
    "spaces_between_special_tokens": _boolean,
    "include_stop_str_in_output": _boolean,
    "structured_outputs": structured_outputs_problem,
    "stream_interval": _integer(1, MAX_TOKEN_ID),
    "extra_args": _extra_args,
}


def sampling_problems(params: Mapping[str, Any]) -> list[str]:
    """Return every problem of a map of sampling parameters. Null means the default; unknown names are problems."""
    params = {name: value for name, value in params.items() if value is not None}
    problems = [f"unknown sampling parameter {str(name)[:40]!r}" for name in params if name not in SAMPLING_RULES]
    for name, value in params.items():
        if name in SAMPLING_RULES and (complaint := SAMPLING_RULES[name](value)):
            problems.append(f"{name} {complaint}")
    if problems:
        return problems
    min_tokens, max_tokens = params.get("min_tokens", 0), params.get("max_tokens", DEFAULT_MAX_TOKENS)
    if min_tokens > max_tokens:
        problems.append(f"min_tokens must be at most max_tokens ({max_tokens}), not {min_tokens}")
    if params.get("n", 1) > 1 and params.get("temperature", DEFAULT_TEMPERATURE) < GREEDY_TEMPERATURE:
        problems.append(f"n must be 1 when temperature is 0, not {params['n']}: all choices would be equal")
    if params.get("stop") and params.get("detokenize") is False:
        problems.append("stop must be absent when detokenize is false: stop strings are found in text")
    return problems


def as_sent(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters as they are sent: without nulls, and with string keys, which strict msgpack requires."""
    sent = {name: value for name, value in params.items() if value is not None}
    if "logit_bias" in sent:
        sent["logit_bias"] = {str(token_id): bias for token_id, bias in sent["logit_bias"].items()}
    return sent
