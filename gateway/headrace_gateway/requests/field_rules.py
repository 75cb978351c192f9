"""The rules of single fields of a body. Readers check values with them. The OpenAPI document shows their schemas."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from headrace_gateway.requests import field_tables
from headrace_wire.chat import NAME
from headrace_wire.rules import Boolean, Integer, Number, OneOf, Rule, Schema, size_problem
from headrace_wire.sampling import MAX_STOP_CHARS, MAX_STOP_STRINGS, MAX_TOKEN_ID, SAMPLING
from headrace_wire.values import shown

LOWEST_PRIORITY: Final = 9
SERVICE_TIERS: Final = ("auto", "default", "flex", "scale", "priority", "fast")
REASONING_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITIES: Final = ("low", "medium", "high")
MAX_METADATA: Final = 16
MAX_METADATA_NAME: Final = 64
MAX_METADATA_VALUE: Final = 512
RESERVED_VARIABLES: Final = (
    "messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template",
)  # fmt: skip
"""Variables of a chat template that fields of the body set."""


@dataclass(frozen=True, slots=True)
class _CacheKey(Rule):
    """A name; empty for none."""

    def problem(self, path: str, value: Any) -> str | None:
        return None if value == "" else NAME.problem(path, value)

    @property
    def schema(self) -> Schema:
        return {"anyOf": [{"const": ""}, NAME.schema]}


@dataclass(frozen=True, slots=True)
class _Stop(Rule):
    """The queue's rule for stop strings. Empty strings are accepted too; they stop nothing."""

    def problem(self, path: str, value: Any) -> str | None:
        return SAMPLING["stop"].problem(path, without_empty(value))

    @property
    def schema(self) -> Schema:
        text = {"type": "string", "maxLength": MAX_STOP_CHARS}
        limit = {"contains": {"minLength": 1}, "minContains": 0, "maxContains": MAX_STOP_STRINGS}
        return {"anyOf": [text, {"type": "array", "items": text, **limit}]}


@dataclass(frozen=True, slots=True)
class _Metadata(Rule):
    """A map of short strings, which the answer repeats."""

    def problem(self, path: str, value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return f"{path} must be a map of strings, got {shown(value)}"
        if problem := size_problem(path, value, "values", MAX_METADATA):
            return problem
        for name, text in value.items():
            if len(name) > MAX_METADATA_NAME:
                return f"{path} must have keys of at most {MAX_METADATA_NAME} characters, got {len(name)}"
            if not isinstance(text, str) or len(text) > MAX_METADATA_VALUE:
                limits = f"strings of at most {MAX_METADATA_VALUE} characters"
                return f"{path} must hold {limits}, got {shown(text)}"
        return None

    @property
    def schema(self) -> Schema:
        return {
            "type": "object",
            "maxProperties": MAX_METADATA,
            "propertyNames": {"maxLength": MAX_METADATA_NAME},
            "additionalProperties": {"type": ["string", "null"], "maxLength": MAX_METADATA_VALUE},
        }


@dataclass(frozen=True, slots=True)
class _Variables(Rule):
    """The caller's variables of a chat template."""

    def problem(self, path: str, value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return f"{path} must be a map from names to values, got {shown(value)}"
        reserved = next((name for name in RESERVED_VARIABLES if name in value), None)
        return None if reserved is None else f"{path}.{reserved} must be absent: it is a field"

    @property
    def schema(self) -> Schema:
        return {"type": "object", "propertyNames": {"not": {"enum": [*RESERVED_VARIABLES]}}}


def without_empty(stop: Any) -> Any:
    """Return the stop strings without empty ones. Any other value stays unchanged."""
    if isinstance(stop, str):
        return [stop] if stop else []
    return [each for each in stop if each != ""] if isinstance(stop, list) else stop


_BOOLEAN: Final = Boolean()
_TOKENS: Final = SAMPLING["max_tokens"]
RULES: Final[Mapping[str, Rule]] = {
    **{name: SAMPLING[ours] for name, ours in field_tables.SAMPLING.items()},
    "top_p": Number(0, 1),  # OpenAI takes 0, which the queue refuses
    "stop": _Stop(),
    "stream": _BOOLEAN,
    "priority": Integer(0, LOWEST_PRIORITY),
    "service_tier": OneOf(SERVICE_TIERS),
    "prompt_cache_key": _CacheKey(),
    "return_token_ids": _BOOLEAN,
    "return_tokens_as_token_ids": _BOOLEAN,
    "parallel_tool_calls": _BOOLEAN,
    "max_tokens": _TOKENS,
    "max_completion_tokens": _TOKENS,
    "max_output_tokens": _TOKENS,
    "max_tool_calls": _TOKENS,
    "top_logprobs": SAMPLING["logprobs"],
    "reasoning_effort": OneOf(REASONING_EFFORTS),
    "chat_template_kwargs": _Variables(),
    "add_generation_prompt": _BOOLEAN,
    "continue_final_message": _BOOLEAN,
    "metadata": _Metadata(),
    "include_reasoning": _BOOLEAN,
    "store": _BOOLEAN,
    "background": _BOOLEAN,
    "verbosity": OneOf(VERBOSITIES),
    "echo": _BOOLEAN,
    "best_of": SAMPLING["n"],
}
COMPLETION_RULES: Final[Mapping[str, Rule]] = {
    "logprobs": SAMPLING["logprobs"],
    "max_tokens": Integer(0, MAX_TOKEN_ID),
}
"""Fields that mean something else in a completion: 0 tokens echo the prompt alone."""
