"""Fields that chat and text completions share: read, checked, and turned into sampling parameters."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

from headrace_broker import GenerateRequest, InvalidRequestError, RegisteredModel, SubmitRequest
from headrace_gateway import field_tables
from headrace_gateway.keys import ApiKey
from headrace_gateway.problems import Problems, shown

MAX_TOKENS: Final = 2**31 - 1
LOWEST_PRIORITY: Final = 9
FLEX_PRIORITY: Final = 7
MAX_LOGPROBS: Final = 20
MAX_CACHE_KEY_CHARS: Final = 200
MAX_N: Final = 64
SERVICE_TIERS: Final = ("auto", "default", "flex", "scale", "priority", "fast")
STREAM_OPTIONS: Final = ("include_usage", "continuous_usage_stats", "include_obfuscation")
# Small models repeat white space endlessly if a grammar permits any. This is llama.cpp's rule for JSON
# (json-schema-to-grammar, SPACE_RULE): one line, or indented lines.
_JSON_SPACE: Final = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}"}


def without_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    """Drop null fields: SDKs send null for what their caller left out."""
    return {name: value for name, value in body.items() if value is not None}


def check_names(
    given: Mapping[str, Any],
    served: frozenset[str],
    problems: Problems,
    refused: Mapping[str, str] = field_tables.REFUSED,
) -> None:
    """Refuse unsupported and unknown fields by name."""
    for name in given:
        if name in refused:
            problems.unsupported(name, f"{name} is not supported: {refused[name]}")
            continue
        if name in served or name in field_tables.SAMPLING or name in field_tables.IGNORED:
            continue
        near = get_close_matches(name[:64], [*served, *field_tables.SAMPLING], n=1)
        hint = f": did you mean {near[0]}?" if near else ""
        problems.unsupported(name[:64], f"unknown field {name[:64]!r}{hint}")


def sampling_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters by the queue's names, unchecked: the queue's rules check them."""
    return {ours: given[name] for name, ours in field_tables.SAMPLING.items() if name in given}


def boolean(given: Mapping[str, Any], name: str, problems: Problems, *, default: bool = False, path: str = "") -> bool:
    """Return the value; the default if it is absent or invalid."""
    value = given.get(name, default)
    if not isinstance(value, bool):
        problems.add(path + name, f"{path}{name} must be true or false, not {shown(value)}")
        return default
    return value


def integer(given: Mapping[str, Any], name: str, low: int, high: int, problems: Problems) -> int | None:
    """Return the value; None if it is absent or invalid."""
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        problems.add(name, f"{name} must be an integer from {low} to {high}, not {shown(value)}")
        return None
    return value


def read_stream(given: Mapping[str, Any], problems: Problems) -> tuple[bool, bool, bool]:
    """Return whether to stream, whether to report the usage, and whether every chunk reports it."""
    stream = boolean(given, "stream", problems)
    options = given.get("stream_options", {})
    if not isinstance(options, Mapping):
        problems.add("stream_options", f"stream_options must be an object, not {shown(options)}")
        return stream, False, False
    if "stream_options" in given and not stream:
        problems.add("stream_options", "stream_options requires stream: true")
    chosen = without_nulls(options)
    problems.unknown_fields("stream_options", chosen, STREAM_OPTIONS)
    usage, continuous, _ = (boolean(chosen, name, problems, path="stream_options.") for name in STREAM_OPTIONS)
    return stream, usage, usage and continuous


def read_priority(given: Mapping[str, Any], problems: Problems) -> tuple[int | None, str | None]:
    """Return the priority that the body asks for, and the service tier to report."""
    priority = integer(given, "priority", 0, LOWEST_PRIORITY, problems)
    tier = given.get("service_tier")
    if tier is None:
        return priority, None
    if tier not in SERVICE_TIERS:
        problems.add("service_tier", f"service_tier must be one of {', '.join(SERVICE_TIERS)}, not {shown(tier)}")
        return priority, None
    if priority is None and tier == "flex":
        priority = FLEX_PRIORITY
    return priority, "flex" if tier == "flex" else "priority" if tier in ("priority", "fast") else "default"


def read_cache_key(given: Mapping[str, Any], problems: Problems) -> SubmitRequest:
    """`prompt_cache_key`: requests with the same key prefer the worker that has their prefix cached."""
    key = given.get("prompt_cache_key")
    if key is None:
        return {}
    if not isinstance(key, str) or not 1 <= len(key) <= MAX_CACHE_KEY_CHARS or not key.isprintable():
        message = f"prompt_cache_key must be 1 to {MAX_CACHE_KEY_CHARS} printable characters"
        problems.add("prompt_cache_key", message)
        return {}
    return {"prefix_key": key}


def read_response_format(given: Mapping[str, Any], sampling: dict[str, Any], problems: Problems) -> None:
    """Turn `response_format` into structured outputs."""
    form = given.get("response_format")
    if form is None:
        return
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind not in ("text", "json_object", "json_schema"):
        message = "response_format must be an object with type text, json_object or json_schema"
        problems.add("response_format.type", message)
        return
    problems.unknown_fields("response_format", form, ("type", "json_schema"))
    if kind == "text":
        return
    if "structured_outputs" in sampling:
        problems.add("response_format", "give response_format or structured_outputs, not both")
        return
    if kind == "json_object":
        sampling["structured_outputs"] = {"json_object": True, **_JSON_SPACE}
        return
    described = form.get("json_schema")
    if not isinstance(described, Mapping) or not isinstance(described.get("schema"), Mapping):
        problems.add("response_format.json_schema.schema", "response_format.json_schema.schema must be an object")
        return
    schema = described["schema"]
    problems.unknown_fields("response_format.json_schema", described, ("name", "description", "schema", "strict"))
    sampling["structured_outputs"] = {"json": schema, **_JSON_SPACE}


def check_request(
    request: SubmitRequest, own_names: Mapping[str, str], problems: Problems, *, messages: str = "messages"
) -> None:
    """Apply the queue's own rules before anything is sent.

    Args:
        own_names: the queue's names of fields -> the names in this API, besides those of the sampling parameters.
        messages: the field that the messages were made from.
    """
    names = {**{ours: name for name, ours in field_tables.SAMPLING.items()}, **own_names}
    try:
        GenerateRequest.parse(request)
    except InvalidRequestError as error:
        problems.of_queue(error.problems, names, messages=messages)


def rest_of_context(model: RegisteredModel | None) -> int:
    """Return a `max_tokens` that fills the context: the engine itself stops at the end of the context."""
    return model.max_model_len if model is not None else MAX_TOKENS


def bounded_priority(asked: int | None, key: ApiKey) -> int:
    """Return the priority of a request: never better than the key's best."""
    return key.best_priority if asked is None else max(asked, key.best_priority)
