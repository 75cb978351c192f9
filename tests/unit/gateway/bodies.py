"""Bodies, models and expected errors for the tests that parse bodies."""

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import strategies as st

from headrace_broker import RegisteredModel
from headrace_broker.models.template_features import TemplateFeatures
from headrace_gateway.errors import ApiError
from headrace_gateway.requests import field_tables
from headrace_gateway.requests.call import Call

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hello"}
RESPONSE: dict[str, Any] = {"model": "m", "input": "hello"}


def model(**features: Any) -> RegisteredModel:
    """Return a model with these features of its chat template, and a `tool_parser` or `reasoning_parser`."""
    parsers = {name: features.pop(name) for name in ("tool_parser", "reasoning_parser") if name in features}
    template = TemplateFeatures(**{"exists": True, "tools": True, **features})
    return RegisteredModel("m", 100, 1.0, "w", template=template, **parsers)


def outcome(read: Callable[..., Call], body: dict[str, Any], **context: Any) -> ApiError | None:
    """Return the error that a body gets; None if it is accepted."""
    try:
        call = read(body, **context)
    except ApiError as error:
        return error
    msgspec.msgpack.encode(call.options)  # the envelope must be able to hold every accepted body
    return None


def refusal(read: Callable[..., Call], body: dict[str, Any], **context: Any) -> ApiError:
    error = outcome(read, body, **context)
    assert error is not None, "the body was accepted"
    assert (error.status, error.kind) == (400, "invalid_request_error")
    return error


_NAMES = sorted(
    field_tables.CHAT
    | field_tables.COMPLETION
    | field_tables.RESPONSE
    | set(field_tables.SAMPLING)
    | set(field_tables.IGNORED)
    | set(field_tables.REFUSED)
)
_WORDS = (
    *("type", "function", "name", "parameters", "strict", "json_schema", "schema", "role", "content", "text", "user"),
    *("assistant", "tool", "tool_calls", "refusal", "auto", "required", "allowed_tools", "mode", "tools", "json"),
    *("grammar", "regex", "choice", "include_usage", "max_pattern_size", "min_count", "0", ""),
)
_TEXTS = st.one_of(st.sampled_from(_WORDS), st.text(max_size=8))
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, 2, -1, 10**400, -(10**400), 2**63, 0.5, 1e308]),
    st.floats(allow_nan=False, allow_infinity=False),
    _TEXTS,
)
JSON = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_TEXTS, inner, max_size=4)),
    max_leaves=12,
)
BODIES = st.dictionaries(st.one_of(st.sampled_from(_NAMES), st.text(max_size=8)), JSON, max_size=8)
"""JSON objects whose names are mostly fields of the API."""
