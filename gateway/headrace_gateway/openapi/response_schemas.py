"""JSON Schemas of the Responses API: the fields of its requests, and its objects."""

from typing import Final

from headrace_gateway.chat.tools import MAX_TOOLS, NAME_PATTERN
from headrace_gateway.openapi import schemas
from headrace_gateway.openapi.schemas import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    OBJECT,
    OTHER_TOOL,
    STRING,
    Schema,
    array,
    body,
    either,
    fields,
    integer,
    or_null,
    record,
)
from headrace_gateway.requests import field_tables
from headrace_gateway.responses.background_options import WINDOWS
from headrace_gateway.responses.fields import INCLUDABLE, NEVER_INCLUDED, SUMMARIES, TRUNCATIONS
from headrace_gateway.responses.input_items import FIELDS, ROLES, STATUSES
from headrace_wire.chat import NAME
from headrace_wire.sampling import MAX_LOGPROBS

_NAME: Final = {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
_PART: Final[dict[str, Schema]] = {
    "type": {"enum": ["input_text", "output_text", "text"]},
    "text": {},
    "refusal": {},
    "annotations": {},
    "logprobs": {},
    "prompt_cache_breakpoint": {},
}
_TEXT_PART: Final = either(
    fields({**_PART, "text": STRING}, "type", "text"),
    fields({**_PART, "type": {"const": "refusal"}, "refusal": STRING}, "type", "refusal"),
)
_CONTENT: Final = either(STRING, array(_TEXT_PART))


def _item(kind: str, required: tuple[str, ...], **own: Schema) -> Schema:
    common: Schema = {
        "type": {"const": kind},
        "id": or_null({"type": "string", "minLength": 1, "maxLength": 128}),
        "status": {"enum": [*STATUSES, None]},
    }
    properties = {name: {**common, **own}.get(name, {}) for name in FIELDS[kind]}
    return fields(properties, *required)


def _reasoning_parts(kind: str) -> Schema:
    return or_null(array(record({"type": {"const": kind}, "text": STRING})))


ITEM: Final = either(
    record({"type": {"const": "item_reference"}, "id": STRING}),
    _item(
        "message",
        ("role", "content"),
        type=either({"const": "message"}, {"type": "null"}),
        role={"enum": [*ROLES]},
        content=_CONTENT,
    ),
    _item(
        "function_call",
        ("type", "call_id", "name", "arguments"),
        call_id=STRING,
        name=NAME.schema,
        arguments=STRING,
    ),
    _item("function_call_output", ("type", "call_id", "output"), call_id=NAME.schema, output=_CONTENT),
    _item(
        "reasoning",
        ("type",),
        summary=_reasoning_parts("summary_text"),
        content=_reasoning_parts("reasoning_text"),
        encrypted_content={"enum": [None, ""]},
    ),
)
_FUNCTION: Final = fields(
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
    fields({"type": {"enum": ["text", "json_object"]}}, "type"),
    fields(
        {
            "type": {"const": "json_schema"},
            "name": STRING,
            "description": STRING,
            "schema": OBJECT,
            "strict": BOOLEAN,
        },
        "type",
        "schema",
    ),
)
_SUMMARY: Final = {"enum": [*SUMMARIES, None]}
_OWN_FIELDS: Final[dict[str, Schema]] = {
    "input": either(STRING, array(ITEM, minItems=1)),
    "instructions": STRING,
    "tools": array(either(_FUNCTION, OTHER_TOOL), maxItems=MAX_TOOLS),
    "tool_choice": either({"enum": ["none", "auto", "required"]}, _NAMED, _ALLOWED),
    "text": fields({"format": _FORMAT, "verbosity": schemas.FIELDS["verbosity"]}),
    "reasoning": fields(
        {"effort": schemas.FIELDS["reasoning_effort"], "summary": _SUMMARY, "generate_summary": _SUMMARY}
    ),
    "include": array({"enum": [*INCLUDABLE, *NEVER_INCLUDED]}),
    "previous_response_id": STRING,
    "truncation": {"enum": [*TRUNCATIONS]},
    "context_management": {},
    "background_options": fields({"completion_window": {"enum": [*WINDOWS]}, "continuation_id": STRING}),
    "stream_options": fields({"include_obfuscation": {}}),
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
    "max_tool_calls": or_null(INTEGER),
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
        "expected_at": INTEGER,
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
    },
    "expected_at",
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
for _echoed in ("user", "safety_identifier"):  # without effect, but the response repeats them
    REQUEST["properties"][_echoed] |= or_null(STRING)
