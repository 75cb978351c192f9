"""The sampling parameters of a request: one table of names and rules, with vLLM's names and ranges."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from headrace_wire.rules import (
    NO_LIMIT,
    Boolean,
    Data,
    Fields,
    Integer,
    ListOf,
    Number,
    OneOrMore,
    Rule,
    Schema,
    Text,
    size_problem,
)
from headrace_wire.structured_outputs import StructuredOutputs
from headrace_wire.values import is_integer, named, shown

MAX_TOKEN_ID: Final = 2**31 - 1
"""The largest token id, and the largest number of tokens."""
MAX_N: Final = 64
MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 1024
MAX_BAD_WORDS: Final = 256
MAX_BAD_WORD_CHARS: Final = 256
MAX_ALLOWED_TOKEN_IDS: Final = 2**18
MAX_BIASED_TOKENS: Final = 1024
MAX_LOGIT_BIAS: Final = 100
MAX_LOGPROBS: Final = 20
MAX_LOGPROB_TOKEN_IDS: Final = 128
MAX_PATTERN_SIZE: Final = 1024
MAX_EXTRA_ARGS: Final = 64

DEFAULT_MAX_TOKENS: Final = 16
DEFAULT_TEMPERATURE: Final = 1.0
GREEDY_TEMPERATURE: Final = 1e-5
"""Below it, decoding is greedy: the float32 softmax is one-hot up to rounding."""

TOKEN_ID: Final = Integer(0, MAX_TOKEN_ID)
_DIGITS: Final = (
    r"0|[1-9][0-9]{0,8}|1[0-9]{9}|20[0-9]{8}|21[0-3][0-9]{7}|214[0-6][0-9]{6}|2147[0-3][0-9]{5}"
    r"|21474[0-7][0-9]{4}|214748[0-2][0-9]{3}|2147483[0-5][0-9]{2}|21474836[0-3][0-9]|214748364[0-7]"
)
"""A token id in digits, as a key of JSON: 0 to MAX_TOKEN_ID."""
is_token_id: Final = re.compile(_DIGITS).fullmatch
"""Whether a key of JSON is a token id."""


_BIAS: Final = Number(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


@dataclass(frozen=True, slots=True)
class _LogitBias(Rule):
    """A map from token ids, as integers or in digits, to numbers."""

    most: int = NO_LIMIT

    def problem(self, path: str, value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return f"{path} must be a map from token ids to numbers, got {shown(value)}"
        if problem := size_problem(path, value, "tokens", self.most):
            return problem
        for key, bias in value.items():
            if not is_token_id(str(key) if is_integer(key) else key if isinstance(key, str) else ""):
                return f"{path} must have token ids from 0 to {MAX_TOKEN_ID} as keys, got {named(key)}"
            if problem := _BIAS.problem(f"{path}.{key}", bias):
                return problem
        return None

    @property
    def schema(self) -> Schema:
        keys = {"propertyNames": {"pattern": f"^({_DIGITS})$"}, "additionalProperties": _BIAS.schema}
        return {"type": "object", **keys} | ({} if self.most == NO_LIMIT else {"maxProperties": self.most})


@dataclass(frozen=True, slots=True)
class _RepetitionDetection(Rule):
    """A map of the three numbers that say when an output is a loop."""

    fields: Fields

    def problem(self, path: str, value: Any) -> str | None:
        if problem := self.fields.problem(path, value):
            return problem
        given = {name: number for name, number in value.items() if number is not None}
        longest, shortest = given.get("max_pattern_size", 0), given.get("min_pattern_size", 0)
        if shortest > longest:
            return f"{path}.min_pattern_size must be at most max_pattern_size ({longest}), got {shortest}"
        count = given.get("min_count", 0)
        return f"{path}.min_count must be at least 2, got {count}" if longest > 0 and count < 2 else None

    @property
    def schema(self) -> Schema:
        return self.fields.schema


_BOOLEAN: Final = Boolean()
_TOKENS: Final = Integer(1, MAX_TOKEN_ID)
_PATTERN_SIZE: Final = Integer(0, MAX_PATTERN_SIZE)

_PATTERN_FIELDS: Final = Fields(
    {"max_pattern_size": _PATTERN_SIZE, "min_pattern_size": _PATTERN_SIZE, "min_count": TOKEN_ID}
)

SAMPLING: Final[Mapping[str, Rule]] = {
    "n": Integer(1, MAX_N),
    "temperature": Number(0),
    "top_p": Number(0, 1, above=True),
    "top_k": Integer(-1, MAX_TOKEN_ID),  # 0 and -1 switch it off
    "min_p": Number(0, 1),
    "seed": Integer(-(2**63), 2**63 - 1),
    "max_tokens": _TOKENS,
    "min_tokens": TOKEN_ID,
    "stop": OneOrMore(ListOf(Text(MAX_STOP_CHARS, least=1), "strings", MAX_STOP_STRINGS)),
    "stop_token_ids": ListOf(TOKEN_ID, "token ids", MAX_STOP_TOKEN_IDS),
    "ignore_eos": _BOOLEAN,
    "logprobs": Integer(0, MAX_LOGPROBS),
    "logprob_token_ids": ListOf(TOKEN_ID, "token ids", MAX_LOGPROB_TOKEN_IDS, least=1),
    "prompt_logprobs": Integer(0, MAX_LOGPROBS),
    "presence_penalty": Number(-2, 2),
    "frequency_penalty": Number(-2, 2),
    "repetition_penalty": Number(0, above=True),
    "logit_bias": _LogitBias(MAX_BIASED_TOKENS),
    "allowed_token_ids": ListOf(TOKEN_ID, "token ids", MAX_ALLOWED_TOKEN_IDS, least=1),
    "bad_words": OneOrMore(ListOf(Text(MAX_BAD_WORD_CHARS, least=1), "strings", MAX_BAD_WORDS)),
    "repetition_detection": _RepetitionDetection(_PATTERN_FIELDS),
    "detokenize": _BOOLEAN,
    "skip_special_tokens": _BOOLEAN,
    "spaces_between_special_tokens": _BOOLEAN,
    "include_stop_str_in_output": _BOOLEAN,
    "structured_outputs": StructuredOutputs(),
    "stream_interval": _TOKENS,
    "extra_args": Data(MAX_EXTRA_ARGS),  # the worker knows the names and refuses the others
}
"""The parameters of a request to a service, whose tenants share workers."""

IN_LIBRARY: Final[Mapping[str, Rule]] = {
    **SAMPLING,
    "logprobs": Integer(-1, MAX_TOKEN_ID),  # -1: all; the engine's max_logprobs is the limit
    "prompt_logprobs": Integer(-1, MAX_TOKEN_ID),
    "stop_token_ids": ListOf(TOKEN_ID, "token ids"),
    "logit_bias": _LogitBias(),
    "allowed_token_ids": ListOf(TOKEN_ID, "token ids", least=1),
    "extra_args": Data(),
}
"""The same for a program that has the engine for itself: sizes without effect on others have no limit."""


def sampling_problems(params: Mapping[str, Any]) -> list[str]:
    """Return every problem of a request's sampling parameters. Null means the default; unknown names are problems."""
    given = {name: value for name, value in params.items() if value is not None}
    problems = []
    for name, value in given.items():
        rule = SAMPLING.get(name)
        if rule is None:
            problems.append(f"unknown sampling parameter {named(name)}")
        elif problem := rule.problem(name, value):
            problems.append(problem)
    return problems or [*contradictions(given)]


def contradictions(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the contradictions between parameters, each of which is valid by itself. An absent one has its default."""
    min_tokens, max_tokens = given.get("min_tokens", 0), given.get("max_tokens", DEFAULT_MAX_TOKENS)
    if max_tokens is not None and min_tokens > max_tokens:
        yield f"min_tokens must be at most max_tokens ({max_tokens}), got {min_tokens}"
    if given.get("n", 1) > 1 and given.get("temperature", DEFAULT_TEMPERATURE) < GREEDY_TEMPERATURE:
        yield f"n must be 1 when temperature is 0, got {given['n']}: all choices would be the same"
    named_tokens, logprobs = given.get("logprob_token_ids"), given.get("logprobs")
    if named_tokens and logprobs not in (None, len(named_tokens)):
        yield f"logprobs must be absent with logprob_token_ids, or their number, {len(named_tokens)}, got {logprobs}"
    if given.get("stop") and given.get("detokenize") is False:
        yield "stop must be absent when detokenize is false: use stop_token_ids"


def as_sent(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters as they are sent: without nulls, and with string keys, which strict msgpack requires."""
    sent = {name: value for name, value in params.items() if value is not None}
    if "logit_bias" in sent:
        sent["logit_bias"] = {str(token_id): bias for token_id, bias in sent["logit_bias"].items()}
    return sent
