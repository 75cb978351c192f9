"""JSON Schemas of Anthropic's Messages API. They omit rules between fields, which `anthropic/fields.py` checks."""

from typing import Final

from headrace_gateway.anthropic.fields import DISPLAYS, EFFORTS, LEAST_BUDGET, TOOL_CHOICES, TOOL_HINTS
from headrace_gateway.chat.tools import MAX_TOOLS, NAME_PATTERN
from headrace_gateway.openapi.schemas import (
    BOOLEAN,
    INTEGER,
    OBJECT,
    STRING,
    Schema,
    array,
    body,
    either,
    fields,
    or_null,
    record,
)
from headrace_gateway.requests import field_tables
from headrace_gateway.requests.field_rules import RULES
from headrace_wire import sampling as rules
from headrace_wire.chat import MAX_MESSAGES, NAME

_NAME: Final = NAME.schema
_MARK: Final[Schema] = {"cache_control": {}}
_TEXT: Final = fields({"type": {"const": "text"}, "text": STRING, "citations": {}, **_MARK}, "type", "text")
_TEXTS: Final = either(STRING, array(_TEXT))
_RESULT: Final = fields(
    {
        "type": {"const": "tool_result"},
        "tool_use_id": _NAME,
        "content": or_null(_TEXTS),
        "is_error": {},
        **_MARK,
    },
    "type",
    "tool_use_id",
)
_USE: Final = fields(
    {"type": {"const": "tool_use"}, "id": STRING, "name": _NAME, "input": OBJECT, "caller": {}, **_MARK},
    "type",
    "id",
    "name",
    "input",
)
_THINKING: Final = fields(
    {"type": {"const": "thinking"}, "thinking": STRING, "signature": {}, **_MARK}, "type", "thinking"
)
_TURN: Final = either(
    fields({"role": {"const": "user"}, "content": either(STRING, array(either(_TEXT, _RESULT)))}, "role", "content"),
    fields(
        {"role": {"const": "assistant"}, "content": either(STRING, array(either(_TEXT, _USE, _THINKING)))},
        "role",
        "content",
    ),
    fields({"role": {"const": "system"}, "content": _TEXTS}, "role", "content"),
)
_TOOL: Final = fields(
    {
        "name": {"type": "string", "pattern": f"^{NAME_PATTERN}$"},
        "type": {"enum": ["custom", None]},
        "description": or_null(STRING),
        "input_schema": OBJECT,
        "strict": or_null(BOOLEAN),
        **{name: {} for name in TOOL_HINTS},
    },
    "name",
    "input_schema",
)
_SERVER_TOOL: Final[Schema] = {
    "type": "object",
    "properties": {"type": {"type": "string", "not": {"const": "custom"}}},
    "required": ["type"],
    "description": "Ignored: the service runs no server tools.",
}
_CHOICE: Final = either(
    *(
        fields(
            {"type": {"enum": kinds}, "name": {}, "disable_parallel_tool_use": or_null(BOOLEAN)},
            "type",
            *(["name"] if kinds == ["tool"] else []),
        )
        for kinds in ([*TOOL_CHOICES], ["tool"])
    )
)
_DISPLAY: Final = {"display": {"enum": [*DISPLAYS, None]}}
_FIELDS: Final[dict[str, Schema]] = {
    "model": STRING,
    "max_tokens": RULES["max_tokens"].schema,
    "messages": array(_TURN, minItems=1, maxItems=MAX_MESSAGES),
    "system": _TEXTS,
    "stop_sequences": array(
        {"type": "string", "minLength": 1, "maxLength": rules.MAX_STOP_CHARS}, maxItems=rules.MAX_STOP_STRINGS
    ),
    "stream": BOOLEAN,
    "temperature": {"type": "number", "minimum": 0, "maximum": 1},
    "top_p": RULES["top_p"].schema,
    "top_k": RULES["top_k"].schema,
    "tools": array(either(_TOOL, _SERVER_TOOL), maxItems=MAX_TOOLS),
    "tool_choice": _CHOICE,
    "thinking": either(
        fields(
            {
                "type": {"const": "enabled"},
                "budget_tokens": {"type": "integer", "minimum": LEAST_BUDGET},
                **_DISPLAY,
            },
            "type",
        ),
        fields({"type": {"enum": ["disabled", "adaptive"]}, "budget_tokens": {}, **_DISPLAY}, "type"),
    ),
    "output_config": fields(
        {
            "effort": {"enum": [*EFFORTS, None]},
            "format": or_null(fields({"type": {"const": "json_schema"}, "schema": OBJECT}, "type", "schema")),
        }
    ),
    "context_management": {},
    "speed": {},
}
REQUEST: Final = body(_FIELDS, field_tables.MESSAGES, field_tables.MESSAGES_IGNORED, "model", "messages", "max_tokens")
COUNTED_REQUEST: Final = body(
    _FIELDS, field_tables.COUNTED_MESSAGES, field_tables.MESSAGES_IGNORED, "model", "messages"
)
_NULL: Final[Schema] = {"type": "null"}
MESSAGE: Final = record(
    {
        "id": STRING,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": STRING,
        "content": array(
            either(
                record({"type": {"const": "text"}, "text": STRING}),
                record({"type": {"const": "thinking"}, "thinking": STRING, "signature": STRING}),
                record(
                    {"type": {"const": "tool_use"}, "id": STRING, "name": STRING, "input": OBJECT, "caller": OBJECT}
                ),
            )
        ),
        "stop_reason": {
            "enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
        },
        "stop_sequence": or_null(STRING),
        "stop_details": _NULL,
        "container": _NULL,
        "usage": record(
            {
                "input_tokens": INTEGER,
                "cache_creation_input_tokens": INTEGER,
                "cache_read_input_tokens": INTEGER,
                "cache_creation": _NULL,
                "output_tokens": INTEGER,
                "output_tokens_details": or_null(record({"thinking_tokens": INTEGER})),
                "server_tool_use": _NULL,
                "inference_geo": _NULL,
                "service_tier": {"const": "standard"},
            }
        ),
    }
)
TOKENS: Final = record({"input_tokens": INTEGER})
ERROR: Final = record(
    {
        "type": {"const": "error"},
        "error": record({"type": STRING, "message": STRING}),
        "request_id": STRING,
    }
)
