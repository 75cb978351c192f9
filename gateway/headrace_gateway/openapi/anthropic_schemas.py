"""JSON Schemas of Anthropic's Messages API. They omit rules between fields, which `anthropic_fields` checks."""

from typing import Final

from headrace_broker import sampling_rules as rules
from headrace_broker.chat_rules import MAX_MESSAGES, MAX_NAME_CHARS
from headrace_gateway import field_tables
from headrace_gateway.anthropic_fields import DISPLAYS, EFFORTS, LEAST_BUDGET, TOOL_CHOICES, TOOL_HINTS
from headrace_gateway.call_fields import MAX_TOKENS
from headrace_gateway.openapi.schemas import (
    BOOLEAN,
    INTEGER,
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
from headrace_gateway.tool_fields import MAX_TOOLS, NAME_PATTERN

_NAME: Final = {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS}
_MARK: Final[Schema] = {"cache_control": {}}
_TEXT: Final = closed({"type": {"const": "text"}, "text": STRING, "citations": {}, **_MARK}, "type", "text")
_TEXTS: Final = either(STRING, array(_TEXT))
_RESULT: Final = closed(
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
_USE: Final = closed(
    {"type": {"const": "tool_use"}, "id": _NAME, "name": _NAME, "input": OBJECT, "caller": {}, **_MARK},
    "type",
    "id",
    "name",
    "input",
)
_THINKING: Final = closed(
    {"type": {"const": "thinking"}, "thinking": STRING, "signature": {}, **_MARK}, "type", "thinking"
)
_TURN: Final = either(
    closed({"role": {"const": "user"}, "content": either(STRING, array(either(_TEXT, _RESULT)))}, "role", "content"),
    closed(
        {"role": {"const": "assistant"}, "content": either(STRING, array(either(_TEXT, _USE, _THINKING)))},
        "role",
        "content",
    ),
    closed({"role": {"const": "system"}, "content": _TEXTS}, "role", "content"),
)
_TOOL: Final = closed(
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
_CHOICE: Final = either(
    *(
        closed(
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
    "max_tokens": integer(1, MAX_TOKENS),
    "messages": array(_TURN, minItems=1, maxItems=MAX_MESSAGES),
    "system": _TEXTS,
    "stop_sequences": array(
        {"type": "string", "minLength": 1, "maxLength": rules.MAX_STOP_CHARS}, maxItems=rules.MAX_STOP_STRINGS
    ),
    "stream": BOOLEAN,
    "temperature": {"type": "number", "minimum": 0, "maximum": 1},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": integer(-1, rules.MAX_TOKEN_ID),
    "tools": array(_TOOL, maxItems=MAX_TOOLS),
    "tool_choice": _CHOICE,
    "thinking": either(
        closed(
            {
                "type": {"const": "enabled"},
                "budget_tokens": {"type": "integer", "minimum": LEAST_BUDGET},
                **_DISPLAY,
            },
            "type",
            "budget_tokens",
        ),
        closed({"type": {"enum": ["disabled", "adaptive"]}, "budget_tokens": {}, **_DISPLAY}, "type"),
    ),
    "output_config": closed(
        {
            "effort": {"enum": [*EFFORTS, None]},
            "format": or_null(closed({"type": {"const": "json_schema"}, "schema": OBJECT}, "type", "schema")),
        }
    ),
    "context_management": {
        "type": "object",
        "properties": {"edits": array(record({"type": {"type": "string", "pattern": "^clear_thinking_"}}))},
    },
    "speed": {"const": "standard"},
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
                record({"type": {"const": "text"}, "text": STRING, "citations": _NULL}),
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
