"""JSON Schemas of the Responses API: the fields of its requests, and its objects."""

from typing import Final

from headrace_gateway import field_tables
from headrace_gateway.call_fields import MAX_LOGPROBS, MAX_TOKENS
from headrace_gateway.input_items import FIELDS, ROLES, STATUSES
from headrace_gateway.openapi import schemas
from headrace_gateway.openapi.schemas import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    OBJECT,
    STRING,
    Schema,
    array,
    body,
    closed,
    either,
    integer,
    or_null,
    record,
)
from headrace_gateway.response_fields import INCLUDABLE, SUMMARIES
from headrace_gateway.tool_fields import MAX_TOOLS, NAME_PATTERN

_NAME: Final = {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
_TEXT_PART: Final = closed(
    {
        "type": {"enum": ["input_text", "output_text", "text", "refusal"]},
        "text": {},
        "refusal": {},
        "annotations": {},
        "logprobs": {},
        "prompt_cache_breakpoint": {},
    },
    "type",
)
_CONTENT: Final = either(STRING, array(_TEXT_PART))


def _item(kind: str, required: tuple[str, ...], **own: Schema) -> Schema:
    common: Schema = {
        "type": {"const": kind},
        "id": or_null({"type": "string", "minLength": 1, "maxLength": 128}),
        "status": {"enum": [*STATUSES, None]},
    }
    properties = {name: {**common, **own}.get(name, {}) for name in FIELDS[kind]}
    return closed(properties, *required)


_REASONING_PARTS: Final = or_null(array({"type": "object", "required": ["type", "text"]}))
ITEM: Final = either(
    record({"type": {"const": "item_reference"}, "id": STRING}),
    _item(
        "message",
        ("role", "content"),
        type=either({"const": "message"}, {"type": "null"}),
        role={"enum": [*ROLES]},
        content=_CONTENT,
    ),
    _item("function_call", ("type", "call_id", "name", "arguments"), call_id=STRING, name=STRING, arguments=STRING),
    _item("function_call_output", ("type", "call_id", "output"), call_id=STRING, output=_CONTENT),
    _item(
        "reasoning",
        ("type",),
        summary=_REASONING_PARTS,
        content=_REASONING_PARTS,
        encrypted_content={"enum": [None, ""]},
    ),
)
_FUNCTION: Final = closed(
    {
        "type": {"const": "function"},
        "name": _NAME,
        "description": or_null(STRING),
        "parameters": or_null(OBJECT),
        "strict": or_null(BOOLEAN),
    },
    "type",
    "name",
)
_NAMED: Final = record({"type": {"const": "function"}, "name": STRING})
_ALLOWED: Final = record(
    {"type": {"const": "allowed_tools"}, "mode": {"enum": ["auto", "required"]}, "tools": array(_NAMED, minItems=1)}
)
_FORMAT: Final = either(
    closed({"type": {"enum": ["text", "json_object"]}}, "type"),
    closed(
        {"type": {"const": "json_schema"}, "name": {}, "description": {}, "schema": OBJECT, "strict": {}},
        "type",
        "schema",
    ),
)
_SUMMARY: Final = {"enum": [*SUMMARIES, None]}
_OWN_FIELDS: Final[dict[str, Schema]] = {
    "input": either(STRING, array(ITEM, minItems=1)),
    "instructions": STRING,
    "max_output_tokens": integer(1, MAX_TOKENS),
    "tools": array(_FUNCTION, maxItems=MAX_TOOLS),
    "tool_choice": either({"enum": ["none", "auto", "required"]}, _NAMED, _ALLOWED),
    "text": closed({"format": or_null(_FORMAT), "verbosity": {"enum": ["medium", None]}}),
    "reasoning": closed({"effort": {}, "summary": _SUMMARY, "generate_summary": _SUMMARY}),
    "include": array({"enum": [*INCLUDABLE]}),
    "previous_response_id": STRING,
    "store": BOOLEAN,
    "background": BOOLEAN,
    "truncation": {"const": "disabled"},
    "stream_options": closed({"include_obfuscation": {}}),
}
"""Fields that the other endpoints do not have, or that mean something else there."""
_SAMPLING: Final = field_tables.SAMPLING.keys() - field_tables.RESPONSE_REFUSED.keys()

_CONFIG: Final[Schema] = {
    "previous_response_id": or_null(STRING),
    "instructions": or_null(STRING),
    "tools": array(OBJECT),
    "tool_choice": {},
    "truncation": {"const": "disabled"},
    "parallel_tool_calls": BOOLEAN,
    "text": OBJECT,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "top_logprobs": integer(0, MAX_LOGPROBS),
    "reasoning": OBJECT,
    "max_output_tokens": or_null(INTEGER),
    "max_tool_calls": {"type": "null"},
    "store": BOOLEAN,
    "background": BOOLEAN,
    "service_tier": STRING,
    "metadata": OBJECT,
    "user": {},
    "safety_identifier": {},
    "prompt_cache_key": or_null(STRING),
}
_ITEM_SHAPE: Final = record({"id": STRING, "type": {"enum": [*FIELDS]}, "status": {"enum": [*STATUSES]}})
RESPONSE: Final = record(
    {
        "id": STRING,
        "object": {"const": "response"},
        "created_at": INTEGER,
        "completed_at": or_null(INTEGER),
        "model": STRING,
        "status": {"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
        "error": or_null(record({"code": STRING, "message": STRING})),
        "incomplete_details": or_null(record({"reason": STRING})),
        "output": array(_ITEM_SHAPE),
        "usage": or_null(
            record(
                {
                    "input_tokens": INTEGER,
                    "input_tokens_details": OBJECT,
                    "output_tokens": INTEGER,
                    "output_tokens_details": OBJECT,
                    "total_tokens": INTEGER,
                }
            )
        ),
        **_CONFIG,
    }
)
DELETED: Final = record({"id": STRING, "object": {"const": "response"}, "deleted": {"const": True}})
ITEMS: Final = record(
    {
        "object": {"const": "list"},
        "data": array(_ITEM_SHAPE),
        "first_id": or_null(STRING),
        "last_id": or_null(STRING),
        "has_more": BOOLEAN,
    }
)
REQUEST: Final = body(
    {**schemas.FIELDS, **_OWN_FIELDS}, field_tables.RESPONSE | _SAMPLING, field_tables.IGNORED, "model", "input"
)
