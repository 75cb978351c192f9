"""For each field of each endpoint: what its schema accepts the reader accepts, and the other way round."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from jsonschema import ValidationError
from jsonschema.validators import Draft202012Validator, extend

from headrace_gateway.anthropic.fields import read_counted, read_message
from headrace_gateway.chat.fields import read_chat
from headrace_gateway.completions.fields import read_completion
from headrace_gateway.openapi import document
from headrace_gateway.requests.call import Call
from headrace_gateway.requests.problems import root_of
from headrace_gateway.responses.fields import read_response
from unit.gateway.bodies import CHAT, COMPLETION, RESPONSE, model, outcome
from unit.gateway.schema_values import OTHERS, around

pytestmark = pytest.mark.rotated("wire", "gateway/headrace_gateway/openapi", "gateway/headrace_gateway/requests")

MESSAGE: dict[str, Any] = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
COUNTED: dict[str, Any] = {"model": "m", "messages": MESSAGE["messages"]}
ENDPOINTS: dict[str, tuple[Callable[..., Call], dict[str, Any]]] = {
    "ChatCompletionRequest": (read_chat, CHAT),
    "CompletionRequest": (read_completion, COMPLETION),
    "ResponseRequest": (read_response, RESPONSE),
    "MessageRequest": (read_message, MESSAGE),
    "MessageTokensRequest": (read_counted, COUNTED),
}
SCHEMAS: dict[str, Any] = document.document()["components"]["schemas"]
TOOLS: dict[str, dict[str, Any]] = {
    "ChatCompletionRequest": {"type": "function", "function": {"name": "f"}},
    "ResponseRequest": {"type": "function", "name": "f"},
    "MessageRequest": {"name": "f", "input_schema": {}},
    "MessageTokensRequest": {"name": "f", "input_schema": {}},
}
BESIDE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "min_tokens": {"max_tokens": 2**31 - 1, "max_output_tokens": 2**31 - 1},
    "continue_final_message": {"add_generation_prompt": False},
    "background_options": {"background": True},
}
"""Field -> the fields that a rule between fields asks for."""
NOT_OF_THE_BODY = {"model"}
"""Checked where the model is looked up."""


def is_beyond_schemas(name: str, value: Any) -> str | None:
    """Return what JSON Schema cannot say about a value, if that applies to it."""
    for found in _all_values(value):
        if isinstance(found, Mapping) and found.get("type") == "item_reference":
            return "the item that a reference names is looked up first"
        if isinstance(found, Mapping) and found.get("role") == "user" and found.get("content") == []:
            return "one of the messages must have a content"
        if isinstance(found, float) and found.is_integer():
            return "an integer may not be written with a decimal point"
        if isinstance(found, int) and abs(found) >= 2**63:
            return "an integer must fit 64 bits where it is stored"
    names = [found["name"] for found in _all_values(value) if isinstance(found, Mapping) and "name" in found]
    if name == "tools" and any(names.count(each) > 1 for each in names):
        return "the functions must have distinct names"
    ids = [item.get("id") for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
    if name == "input" and any(each is not None and ids.count(each) > 1 for each in ids):
        return "the items must have distinct ids"
    if name == "best_of" and value in range(2, 65):
        return "it must be equal to n"
    if isinstance(value, Mapping):
        if name in ("metadata", "logit_bias") and None in value.values():
            return "a null is dropped, with its key"
        if name == "structured_outputs" and isinstance(value.get("json"), str):
            return "the text of a schema must be JSON"
        if name == "tool_choice" and value.get("type") in ("function", "allowed_tools", "tool"):
            return "the function must be one of the tools"
        if name == "repetition_detection":
            return "the sizes must fit together"
    return None


def _all_values(value: Any) -> Iterator[Any]:
    yield value
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _all_values(inner)


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    # in JSON Schema, as in JavaScript, `$` is the end of the text; in Python it may stand before a last line break
    if isinstance(instance, str) and not re.search(re.sub(r"\$$", r"\\Z", pattern), instance):
        yield ValidationError(f"{instance!r} does not match {pattern}")


Validator = extend(Draft202012Validator, {"pattern": _pattern})

CASES = [
    (schema, name) for schema in ENDPOINTS for name in sorted(SCHEMAS[schema]["properties"].keys() - NOT_OF_THE_BODY)
]


def refusal_of(schema: str, name: str, value: Any) -> str | None:
    """Return the reader's problem with this field; None if it accepts the value."""
    read, least = ENDPOINTS[schema]
    beside = {key: each for key, each in BESIDE.get(name, {}).items() if key in SCHEMAS[schema]["properties"]}
    if name == "tool_choice":
        beside = {"tools": [TOOLS[schema]]}
    context = {"lora": None} if read is read_completion else {"model": model(), "lora": None}
    error = outcome(read, {**least, **beside, name: value}, **context)
    if error is None or (error.param is not None and root_of(error.param) != name):
        return None
    return error.message


@pytest.mark.parametrize(("schema", "name"), CASES, ids=[f"{schema}-{name}" for schema, name in CASES])
def test_the_schema_and_the_reader_accept_the_same_values(schema: str, name: str) -> None:
    field = SCHEMAS[schema]["properties"][name]
    validator = Validator({**field, "components": {"schemas": SCHEMAS}})

    def check(value: Any) -> None:
        value = json.loads(json.dumps(value))
        if value is None and name in SCHEMAS[schema]["required"]:
            return
        if is_beyond_schemas(name, value) is None:
            refusal = refusal_of(schema, name, value)
            assert validator.is_valid(value) == (refusal is None), (value, refusal)

    for value in OTHERS:
        check(value)
    examples = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    examples(given(around(field))(check))()
