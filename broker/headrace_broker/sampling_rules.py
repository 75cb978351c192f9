"""The sampling parameters that a message may carry: one table of names, types and ranges."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 1024
MAX_TOKEN_ID: Final = 2**31 - 1

DEFAULT_MAX_TOKENS: Final = 16
DEFAULT_TEMPERATURE: Final = 1.0

Rule: TypeAlias = Callable[[Any], str | None]
"""Says what the value must be and is not, or None where it is."""


def shown(value: object) -> str:
    """A value as an error message may show it: numbers and names, but never text that could be a prompt."""
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)[:40]
    if isinstance(value, (str, bytes)):
        return f"{type(value).__name__} of length {len(value)}"
    return type(value).__name__


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(low: int, high: int) -> Rule:
    def rule(value: Any) -> str | None:
        if is_integer(value) and low <= value <= high:
            return None
        return f"must be an integer from {low} to {high}, not {shown(value)}"

    return rule


def _number(low: float, high: float = math.inf, *, above: bool = False) -> Rule:
    def rule(value: Any) -> str | None:
        number = is_integer(value) or isinstance(value, float)
        if number and math.isfinite(value) and value <= high and (value > low if above else value >= low):
            return None
        lower = f"above {low:g}" if above else f"at least {low:g}"
        upper = f" and at most {high:g}" if math.isfinite(high) else " and finite"
        return f"must be a number {lower}{upper}, not {shown(value)}"

    return rule


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else f"must be true or false, not {shown(value)}"


def _stop(value: Any) -> str | None:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple)):
        return f"must be a string or a list of strings, not {shown(value)}"
    if len(strings) > MAX_STOP_STRINGS:
        return f"must hold at most {MAX_STOP_STRINGS} strings, not {len(strings)}"
    for string in strings:
        if not isinstance(string, str) or not 1 <= len(string) <= MAX_STOP_CHARS:
            return f"must hold strings of 1 to {MAX_STOP_CHARS} characters, not {shown(string)}"
        if not is_unicode(string):
            return "must hold valid Unicode text, without lone surrogates"
    return None


def _stop_token_ids(value: Any) -> str | None:
    if not isinstance(value, (list, tuple)):
        return f"must be a list of token ids, not {shown(value)}"
    if len(value) > MAX_STOP_TOKEN_IDS:
        return f"must hold at most {MAX_STOP_TOKEN_IDS} token ids, not {len(value)}"
    return token_id_problem(value)


def token_id_problem(token_ids: list[Any] | tuple[Any, ...]) -> str | None:
    """What is wrong with the first bad token id, if any."""
    for position, token_id in enumerate(token_ids):
        if not is_integer(token_id) or not 0 <= token_id <= MAX_TOKEN_ID:
            return f"must hold integers from 0 to {MAX_TOKEN_ID}, not {shown(token_id)} at position {position}"
    return None


def is_unicode(text: str) -> bool:
    """Lone surrogates are the only strings that UTF-8, and so msgpack, cannot carry."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _optional(rule: Rule) -> Rule:
    """For the parameters whose vLLM default is None: null means absent."""
    return lambda value: None if value is None else rule(value)


SAMPLING_RULES: Final[Mapping[str, Rule]] = {
    "n": _integer(1, 64),
    "temperature": _number(0),
    "top_p": _number(0, 1, above=True),
    "top_k": _integer(-1, MAX_TOKEN_ID),  # 0 and -1 switch it off
    "min_p": _number(0, 1),
    "seed": _optional(_integer(-(2**63), 2**63 - 1)),
    "max_tokens": _integer(1, MAX_TOKEN_ID),
    "min_tokens": _integer(0, MAX_TOKEN_ID),
    "stop": _optional(_stop),
    "stop_token_ids": _optional(_stop_token_ids),
    "ignore_eos": _boolean,
    "logprobs": _optional(_integer(0, 20)),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0, 2, above=True),
    "skip_special_tokens": _boolean,
    "include_stop_str_in_output": _boolean,
}


def sampling_problems(params: Mapping[str, Any]) -> list[str]:
    """Every problem of a map of sampling parameters; unknown names are refused by name."""
    problems = [f"unknown sampling parameter {str(name)[:40]!r}" for name in params if name not in SAMPLING_RULES]
    for name, value in params.items():
        complaint = SAMPLING_RULES[name](value) if name in SAMPLING_RULES else None
        if complaint:
            problems.append(f"{name} {complaint}")
    if problems:
        return problems
    min_tokens, max_tokens = params.get("min_tokens", 0), params.get("max_tokens", DEFAULT_MAX_TOKENS)
    if min_tokens > max_tokens:
        problems.append(f"min_tokens must be at most max_tokens ({max_tokens}), not {min_tokens}")
    if params.get("n", 1) > 1 and params.get("temperature", DEFAULT_TEMPERATURE) == 0:
        problems.append(f"n must be 1 when temperature is 0, not {params['n']}: all choices would be equal")
    return problems
