"""JSON Schemas of the API: one per request field, and those of the answers.

They omit rules between fields, which `fields.py` of `chat` and `completions` checks.
"""

from collections.abc import Mapping, Set
from typing import Final

from headrace_gateway.chat.messages import ROLES
from headrace_gateway.chat.tools import MAX_TOOLS, NAME_PATTERN
from headrace_gateway.completions.fields import MAX_PROMPTS
from headrace_gateway.requests.call_fields import STREAM_OPTIONS
from headrace_gateway.requests.field_rules import COMPLETION_RULES, RULES
from headrace_wire.chat import MAX_MESSAGES, NAME
from headrace_wire.request import FIELDS as REQUEST_FIELDS
from headrace_wire.rules import Schema as Schema
from headrace_wire.rules import or_null as or_null
from headrace_wire.sampling import MAX_LOGPROBS

BOOLEAN: Final[Schema] = {"type": "boolean"}
STRING: Final[Schema] = {"type": "string"}
INTEGER: Final[Schema] = {"type": "integer"}
NUMBER: Final[Schema] = {"type": "number"}
OBJECT: Final[Schema] = {"type": "object"}


def integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def array(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


def closed(properties: Schema, *required: str) -> Schema:
    """Return an object schema that allows no other properties."""
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def fields(properties: Schema, *required: str) -> Schema:
    """Return an object schema of a request: other properties are ignored, and those not required may be null."""
    nullable = {name: each if name in required else or_null(each) for name, each in properties.items()}
    return {"type": "object", "properties": nullable, "required": [*required]}


def record(properties: Schema, *optional: str) -> Schema:
    """Return an object schema of an answer. It allows other properties, because later releases may add some."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas]}


_TOKEN_IDS: Final = REQUEST_FIELDS["prompt_token_ids"].schema
_NAME: Final = NAME.schema
_RESPONSE_FORMAT: Final = either(
    fields({"type": {"enum": ["text", "json_object"]}}, "type"),
    fields(
        {
            "type": {"const": "json_schema"},
            "json_schema": fields({"name": {}, "description": {}, "schema": OBJECT, "strict": {}}, "schema"),
        },
        "type",
        "json_schema",
    ),
)
_FUNCTION: Final = fields(
    {
        "name": {"type": "string", "pattern": f"^{NAME_PATTERN}$"},
        "description": or_null(STRING),
        "parameters": or_null(OBJECT),
        "strict": or_null(BOOLEAN),
    },
    "name",
)
_TOOL: Final = fields({"type": {"const": "function"}, "function": _FUNCTION}, "type", "function")
OTHER_TOOL: Final[Schema] = {
    "type": "object",
    "properties": {"type": {"type": "string", "not": {"const": "function"}}},
    "required": ["type"],
    "description": "Ignored: only functions are supported.",
}
_NAMED: Final = record({"type": {"const": "function"}, "function": record({"name": STRING})})
_ALLOWED: Final = record(
    {
        "type": {"const": "allowed_tools"},
        "allowed_tools": record({"mode": {"enum": ["auto", "required"]}, "tools": array(_NAMED, minItems=1)}),
    }
)
_PART: Final = either(
    record({"type": {"const": "text"}, "text": STRING}), record({"type": {"const": "refusal"}, "refusal": STRING})
)
_CALL: Final = fields(
    {
        "id": {},
        "index": {},
        "type": {"const": "function"},
        "function": fields({"name": _NAME, "arguments": or_null(either(STRING, OBJECT))}, "name"),
    },
    "function",
)
_NOTHING: Final[Schema] = {"enum": [None, False, 0, "", [], {}]}


def _message(roles: list[str], own: Schema, *required: str) -> Schema:
    common = {
        "role": {"enum": roles},
        "content": either(STRING, array(_PART)),
        "name": _NAME,
        "tool_calls": {"type": "null"},
        "tool_call_id": _NAME,
        "reasoning": STRING,
        "reasoning_content": STRING,
        "refusal": {},
        "annotations": {},
        "audio": _NOTHING,
        "function_call": _NOTHING,
    }
    return fields({**common, **own}, "role", *required)


_CALLS: Final = {"tool_calls": array(_CALL)}
_MESSAGE: Final = either(
    _message([role for role in ROLES if role not in ("assistant", "tool")], {}, "content"),
    _message(["tool"], {}, "content", "tool_call_id"),
    _message(["assistant"], _CALLS, "content"),
    _message(["assistant"], {"tool_calls": array(_CALL, minItems=1)}, "tool_calls"),
    _message(["assistant"], {**_CALLS, "refusal": STRING}, "refusal"),
)

FIELDS: Final[dict[str, Schema]] = {
    **{name: rule.schema for name, rule in RULES.items()},
    "model": STRING,
    "stream_options": fields({name: or_null(BOOLEAN) for name in STREAM_OPTIONS}),
    "response_format": _RESPONSE_FORMAT,
    # chats
    "messages": array(_MESSAGE, minItems=1, maxItems=MAX_MESSAGES),
    "tools": array(either(_TOOL, OTHER_TOOL), maxItems=MAX_TOOLS),
    "tool_choice": either({"enum": ["none", "auto", "required"]}, _NAMED, _ALLOWED),
    "modalities": {"const": ["text"]},
    # completions
    "prompt": either(
        STRING,
        _TOKEN_IDS,
        array(either(STRING, _TOKEN_IDS), minItems=1, maxItems=MAX_PROMPTS),
    ),
    "suffix": {"const": ""},
}
"""The schema of each field that both endpoints share."""
CHAT_FIELDS: Final = {"logprobs": BOOLEAN}
COMPLETION_FIELDS: Final = {name: rule.schema for name, rule in COMPLETION_RULES.items()}
"""Fields that mean something else in each endpoint."""


def body(own: Mapping[str, Schema], names: Set[str], ignored: Mapping[str, str], *required: str) -> Schema:
    """Return the schema of a request. A field that is not required may be null.

    Args:
        own: the schemas of at least the fields in `names`.
        ignored: fields without effect -> why that is harmless.
    """
    properties = {name: own[name] for name in sorted(names)}
    request = fields(properties, *required)
    for name, reason in sorted(ignored.items()):
        request["properties"][name] = {"description": f"Accepted without effect: {reason}."}
    return request


ERROR: Final = record(
    {"error": record({"message": STRING, "type": STRING, "param": or_null(STRING), "code": or_null(STRING)})}
)
_USAGE: Final = record(
    {
        "prompt_tokens": INTEGER,
        "completion_tokens": INTEGER,
        "total_tokens": INTEGER,
        "prompt_tokens_details": record({"cached_tokens": INTEGER}),
        "completion_tokens_details": record({"reasoning_tokens": INTEGER}),
    },
    "prompt_tokens_details",
    "completion_tokens_details",
)
_CHAT_TOKEN: Final = record({"token": STRING, "logprob": NUMBER, "bytes": or_null(array(integer(0, 255)))})
_CHAT_LOGPROBS: Final = record(
    {
        "content": array(
            record({**_CHAT_TOKEN["properties"], "top_logprobs": array(_CHAT_TOKEN, maxItems=MAX_LOGPROBS)})
        ),
        "refusal": {"type": "null"},
    }
)
_ANSWER_CALL: Final = record(
    {"id": STRING, "type": {"const": "function"}, "function": record({"name": STRING, "arguments": STRING})}
)
_CHOICE: Final = {
    "index": INTEGER,
    "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
    "stop_reason": either(STRING, INTEGER),
    "token_ids": array(INTEGER),
}
_ANSWER: Final = {"id": STRING, "created": INTEGER, "model": STRING, "service_tier": STRING}
CHAT_COMPLETION: Final = record(
    {
        **_ANSWER,
        "object": {"const": "chat.completion"},
        "choices": array(
            record(
                {
                    **_CHOICE,
                    "message": record(
                        {
                            "role": {"const": "assistant"},
                            "content": or_null(STRING),
                            "refusal": {"type": "null"},
                            "reasoning_content": STRING,
                            "tool_calls": array(_ANSWER_CALL, minItems=1),
                        },
                        "reasoning_content",
                        "tool_calls",
                    ),
                    "logprobs": or_null(_CHAT_LOGPROBS),
                },
                "stop_reason",
                "token_ids",
            ),
            minItems=1,
        ),
        "usage": _USAGE,
        "metadata": OBJECT,
        "prompt_logprobs": {"type": "array"},
    },
    "service_tier",
    "metadata",
    "prompt_logprobs",
)
COMPLETION: Final = record(
    {
        **_ANSWER,
        "object": {"const": "text_completion"},
        "choices": array(
            record(
                {
                    **_CHOICE,
                    "text": STRING,
                    "logprobs": or_null(
                        record(
                            {
                                "tokens": array(STRING),
                                "token_logprobs": array(or_null(NUMBER)),
                                "top_logprobs": array(or_null({"type": "object", "additionalProperties": NUMBER})),
                                "text_offset": array(INTEGER),
                            }
                        )
                    ),
                    "prompt_logprobs": {"type": "array"},
                },
                "stop_reason",
                "token_ids",
                "prompt_logprobs",
            ),
            minItems=1,
        ),
        "usage": _USAGE,
    },
    "service_tier",
)
UNFINISHED: Final = record({"id": STRING, "created": INTEGER, "model": STRING, "status": {"const": "in_progress"}})
MODEL: Final = record(
    {
        "id": STRING,
        "object": {"const": "model"},
        "created": INTEGER,
        "owned_by": STRING,
        "root": STRING,
        "parent": or_null(STRING),
        "max_model_len": INTEGER,
        "tasks": array(STRING),
        "dimensions": INTEGER,
        "permission": {"type": "array"},
        "state": {"const": "loading"},
        "progress": {"type": "number", "minimum": 0, "maximum": 1},
    },
    "max_model_len",
    "tasks",
    "dimensions",
    "state",
    "progress",
)
MODELS: Final = record({"object": {"const": "list"}, "data": array({"$ref": "#/components/schemas/Model"})})
PROBE: Final = record({"status": {"enum": ["ok", "unavailable"]}, "reason": STRING}, "reason")
