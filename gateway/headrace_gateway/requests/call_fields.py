"""Fields that chat and text completions share: read, checked, and turned into sampling parameters."""

from collections.abc import Mapping
from typing import Any, Final

from headrace_broker import GenerateRequest, InvalidRequestError, RegisteredModel
from headrace_gateway.keys.api_key import ApiKey
from headrace_gateway.requests import field_tables
from headrace_gateway.requests.field_rules import RULES, without_empty
from headrace_gateway.requests.problems import Problems
from headrace_wire.rules import Boolean, Rule
from headrace_wire.sampling import MAX_TOKEN_ID
from headrace_wire.values import is_number, named, shown

FLEX_PRIORITY: Final = 7
_LEAST_TOP_P: Final = 1e-9
"""Leaves the most probable token only, as 0 does in OpenAI's API."""
_DEEPEST: Final = 16
"""Depth at which the search for null fields stops. No field of the API is nested more deeply."""
_OWN_VALUES: Final = frozenset(
    {"parameters", "schema", "input_schema", "json", "arguments", "chat_template_kwargs", "vllm_xargs"}
)
"""Fields whose values belong to the caller, at any depth."""
STREAM_OPTIONS: Final = ("include_usage", "continuous_usage_stats", "include_obfuscation")
# Small models repeat white space endlessly if a grammar permits any. This is llama.cpp's rule for JSON
# (json-schema-to-grammar, SPACE_RULE): one line, or indented lines.
_JSON_SPACE: Final = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}"}


def without_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    """Drop null fields at every depth: SDKs send null for what their caller left out.

    Values of the caller, such as JSON Schemas, keep their nulls.
    """
    return {name: _present(name, value, 1) for name, value in body.items() if value is not None}


def _present(name: str, value: Any, depth: int) -> Any:
    if depth == _DEEPEST or name in _OWN_VALUES:
        return value
    if isinstance(value, dict):
        if name == "input":  # of a call in Anthropic's API; the input of the Responses API is an array
            return value
        return {key: _present(key, each, depth + 1) for key, each in value.items() if each is not None}
    return [_present("", each, depth + 1) for each in value] if isinstance(value, list) else value


def check_names(
    given: Mapping[str, Any],
    served: frozenset[str],
    problems: Problems,
    refused: Mapping[str, str] = field_tables.REFUSED,
) -> None:
    """Refuse unsupported and misspelt fields by name, and ignore other unknown ones."""
    problems.unknown_names(given, served | field_tables.SAMPLING.keys() | field_tables.IGNORED.keys(), refused)


def sampling_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters by the queue's names, unchecked: the queue's rules check them.

    OpenAI takes `top_p` 0 and empty stop strings, which the queue refuses.
    """
    sampling = {ours: given[name] for name, ours in field_tables.SAMPLING.items() if name in given}
    top_p = sampling.get("top_p")
    if is_number(top_p) and top_p == 0:
        sampling["top_p"] = _LEAST_TOP_P
    if "stop" in sampling:
        sampling["stop"] = without_empty(sampling["stop"])
    return sampling


def boolean(given: Mapping[str, Any], name: str, problems: Problems, *, default: bool = False, path: str = "") -> bool:
    """Return the value; the default if it is absent or invalid."""
    value = given.get(name, default)
    if problem := Boolean().problem(path + name, value):
        problems.add(path + name, problem)
        return default
    return bool(value)


def checked(given: Mapping[str, Any], name: str, problems: Problems, rule: Rule | None = None) -> Any:
    """Return the value; None if it is absent or its rule refuses it."""
    value = given.get(name)
    if value is None:
        return None
    if problem := (rule or RULES[name]).problem(name, value):
        problems.add(problem.partition(" ")[0], problem)
        return None
    return value


def read_stream(given: Mapping[str, Any], problems: Problems) -> tuple[bool, bool, bool]:
    """Return whether to stream, whether to report the usage, and whether every chunk reports it."""
    stream = boolean(given, "stream", problems)
    options = given.get("stream_options", {})
    if not isinstance(options, Mapping):
        problems.must("stream_options", "be a map", shown(options))
        return stream, False, False
    if "stream_options" in given and not stream:
        problems.add("stream_options", "stream_options requires stream: true")
    problems.unknown_fields("stream_options", options, STREAM_OPTIONS)
    usage, continuous, _ = (boolean(options, name, problems, path="stream_options.") for name in STREAM_OPTIONS)
    return stream, usage, usage and continuous


def read_priority(given: Mapping[str, Any], problems: Problems) -> tuple[int | None, str | None]:
    """Return the priority that the body asks for, and the service tier to report."""
    priority = checked(given, "priority", problems)
    tier = checked(given, "service_tier", problems)
    if tier is None:
        return priority, None
    if priority is None and tier == "flex":
        priority = FLEX_PRIORITY
    return priority, "flex" if tier == "flex" else "priority" if tier in ("priority", "fast") else "default"


def read_response_format(given: Mapping[str, Any], sampling: dict[str, Any], problems: Problems) -> None:
    """Turn `response_format` into structured outputs."""
    wanted = given.get("response_format")
    if wanted is None:
        return
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind not in ("text", "json_object", "json_schema"):
        problems.must("response_format.type", "be text, json_object or json_schema", named(kind))
        return
    problems.unknown_fields("response_format", wanted, ("type", "json_schema"))
    if kind == "text":
        return
    if "structured_outputs" in sampling:
        problems.add("response_format", "give response_format or structured_outputs, not both")
        return
    if kind == "json_object":
        sampling["structured_outputs"] = {"json_object": True, **_JSON_SPACE}
        return
    described = wanted.get("json_schema")
    if not isinstance(described, Mapping) or not isinstance(described.get("schema"), Mapping):
        problems.add("response_format.json_schema.schema", "response_format.json_schema.schema must be a map, got none")
        return
    schema = described["schema"]
    problems.unknown_fields("response_format.json_schema", described, ("name", "description", "schema", "strict"))
    sampling["structured_outputs"] = {"json": schema, **_JSON_SPACE}


def checked_request(
    request: Mapping[str, Any], own_names: Mapping[str, str], problems: Problems, *, messages: str = "messages"
) -> GenerateRequest:
    """Return the request for the queue after the queue's own rules have checked it. Raises ApiError with all problems.

    Args:
        request: the keyword arguments of the queue's task.
        own_names: the queue's names of fields -> the names in this API, besides those of the sampling parameters.
        messages: the field that the messages were made from.
    """
    names = {**{ours: name for name, ours in field_tables.SAMPLING.items()}, **own_names}
    checked_one = GenerateRequest()
    try:
        checked_one = GenerateRequest.parse(request)
    except InvalidRequestError as error:
        problems.of_queue(error.problems, names, messages=messages)
    problems.raise_any()
    return checked_one


def rest_of_context(model: RegisteredModel | None) -> int:
    """Return a `max_tokens` that fills the context: the engine itself stops at the end of the context."""
    return model.max_model_len if model is not None else MAX_TOKEN_ID


def bounded_priority(asked: int | None, key: ApiKey) -> int:
    """Return the priority of a request, never higher than the key's `best_priority`. 0 is the highest."""
    return key.best_priority if asked is None else max(asked, key.best_priority)
