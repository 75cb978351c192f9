"""JSON Schemas of the API: one per request field, and those of the answers.

They omit rules between fields, which `chat_fields` and `completion_fields` check.
"""

from collections.abc import Mapping, Set
from typing import Any, Final

from headrace_broker import sampling_rules as rules
from headrace_broker.chat_rules import MAX_MESSAGES, MAX_NAME_CHARS
from headrace_broker.structured_rules import MAX_CHOICES, MAX_GRAMMAR_BYTES
from headrace_gateway.call_fields import (
    LOWEST_PRIORITY,
    MAX_CACHE_KEY_CHARS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_TOKENS,
    SERVICE_TIERS,
    STREAM_OPTIONS,
)
from headrace_gateway.chat_fields import MAX_METADATA, MAX_METADATA_NAME, MAX_METADATA_VALUE, REASONING_EFFORTS
from headrace_gateway.completion_fields import MAX_PROMPTS
from headrace_gateway.message_fields import ROLES
from headrace_gateway.tool_fields import MAX_TOOLS, NAME_PATTERN

Schema = dict[str, Any]

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


def record(properties: Schema, *optional: str) -> Schema:
    """Return an object schema that allows other properties, as answers have: later releases may add some."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas]}


def or_null(schema: Schema) -> Schema:
    return either(schema, {"type": "null"})


_TOKEN_ID: Final = integer(0, rules.MAX_TOKEN_ID)
_GRAMMAR: Final = {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR_BYTES}
_NAME: Final = {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS}


def _strings(most: int, most_chars: int) -> Schema:
    one = {"type": "string", "minLength": 1, "maxLength": most_chars}
    return either(one, array(one, maxItems=most))


_STRUCTURED: Final = closed(
    {
        "json": or_null(either(OBJECT, _GRAMMAR)),
        "regex": or_null(_GRAMMAR),
        "choice": or_null(array({"type": "string", "minLength": 1}, minItems=1, maxItems=MAX_CHOICES)),
        "grammar": or_null(_GRAMMAR),
        "json_object": {"enum": [True, None]},
        "disable_any_whitespace": or_null(BOOLEAN),
        "whitespace_pattern": or_null(_GRAMMAR),
    }
) | {"minProperties": 1}
_RESPONSE_FORMAT: Final = either(
    record({"type": {"enum": ["text", "json_object"]}}),
    closed(
        {
            "type": {"const": "json_schema"},
            "json_schema": closed({"name": {}, "description": {}, "schema": OBJECT, "strict": {}}, "schema"),
        },
        "type",
        "json_schema",
    ),
)
_FUNCTION: Final = closed(
    {
        "name": {"type": "string", "pattern": f"^{NAME_PATTERN}$"},
        "description": or_null(STRING),
        "parameters": or_null(OBJECT),
        "strict": or_null(BOOLEAN),
    },
    "name",
)
_TOOL: Final = closed({"type": {"const": "function"}, "function": _FUNCTION}, "type", "function")
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
_CALL: Final = closed(
    {
        "id": {},
        "index": {},
        "type": {"const": "function"},
        "function": closed({"name": _NAME, "arguments": or_null(either(STRING, OBJECT))}, "name"),
    },
    "function",
)
_MESSAGE: Final = closed(
    {
        "role": {"enum": [*ROLES]},
        "content": or_null(either(STRING, array(_PART))),
        "name": or_null(_NAME),
        "tool_calls": or_null(array(_CALL)),
        "tool_call_id": or_null(_NAME),
        "reasoning": or_null(STRING),
        "reasoning_content": or_null(STRING),
        "refusal": {},
        "annotations": {},
        "audio": {"type": "null"},
        "function_call": {"type": "null"},
    },
    "role",
)

FIELDS: Final[dict[str, Schema]] = {
    "model": STRING,
    "stream": BOOLEAN,
    "stream_options": closed({name: or_null(BOOLEAN) for name in STREAM_OPTIONS}),
    "priority": integer(0, LOWEST_PRIORITY),
    "service_tier": {"enum": [*SERVICE_TIERS]},
    "prompt_cache_key": {"type": "string", "minLength": 1, "maxLength": MAX_CACHE_KEY_CHARS},
    "response_format": _RESPONSE_FORMAT,
    "return_token_ids": BOOLEAN,
    "return_tokens_as_token_ids": BOOLEAN,
    # chats
    "messages": array(_MESSAGE, minItems=1, maxItems=MAX_MESSAGES),
    "tools": array(_TOOL, maxItems=MAX_TOOLS),
    "tool_choice": either({"enum": ["none", "auto", "required"]}, _NAMED, _ALLOWED),
    "parallel_tool_calls": BOOLEAN,
    "max_completion_tokens": integer(1, MAX_TOKENS),
    "top_logprobs": integer(0, MAX_LOGPROBS),
    "reasoning_effort": {"enum": [*REASONING_EFFORTS]},
    "chat_template_kwargs": OBJECT,
    "add_generation_prompt": BOOLEAN,
    "continue_final_message": BOOLEAN,
    "metadata": {
        "type": "object",
        "maxProperties": MAX_METADATA,
        "propertyNames": {"maxLength": MAX_METADATA_NAME},
        "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
    },
    "include_reasoning": BOOLEAN,
    "store": {"const": False},
    "verbosity": {"const": "medium"},
    "modalities": {"const": ["text"]},
    # completions
    "prompt": either(
        {"type": "string", "minLength": 1},
        array(_TOKEN_ID, minItems=1),
        array(
            either({"type": "string", "minLength": 1}, array(_TOKEN_ID, minItems=1)), minItems=1, maxItems=MAX_PROMPTS
        ),
    ),
    "echo": BOOLEAN,
    "suffix": {"const": ""},
    "best_of": integer(1, MAX_N),
    # sampling
    "temperature": {"type": "number", "minimum": 0},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": integer(-1, rules.MAX_TOKEN_ID),
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "n": integer(1, MAX_N),
    "seed": integer(-(2**63), 2**63 - 1),
    "stop": _strings(rules.MAX_STOP_STRINGS, rules.MAX_STOP_CHARS),
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
    "logit_bias": {
        "type": "object",
        "maxProperties": rules.MAX_BIASED_TOKENS,
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {
            "type": "number",
            "minimum": -rules.MAX_LOGIT_BIAS,
            "maximum": rules.MAX_LOGIT_BIAS,
        },
    },
    "min_tokens": integer(0, MAX_TOKENS),
    "stop_token_ids": array(_TOKEN_ID, maxItems=rules.MAX_STOP_TOKEN_IDS),
    "ignore_eos": BOOLEAN,
    "include_stop_str_in_output": BOOLEAN,
    "skip_special_tokens": BOOLEAN,
    "spaces_between_special_tokens": BOOLEAN,
    "prompt_logprobs": integer(0, MAX_LOGPROBS),
    "allowed_token_ids": array(_TOKEN_ID, minItems=1, maxItems=rules.MAX_ALLOWED_TOKEN_IDS),
    "bad_words": _strings(rules.MAX_BAD_WORDS, rules.MAX_BAD_WORD_CHARS),
    "structured_outputs": _STRUCTURED,
    "repetition_detection": closed(
        {
            "max_pattern_size": integer(0, rules.MAX_PATTERN_SIZE),
            "min_pattern_size": integer(0, rules.MAX_PATTERN_SIZE),
            "min_count": integer(0, rules.MAX_TOKEN_ID),
        }
    ),
    "stream_interval": integer(1, MAX_TOKENS),
    "vllm_xargs": {"type": "object", "maxProperties": rules.MAX_EXTRA_ARGS},
}
"""The schema of each field, where both endpoints share it."""
CHAT_FIELDS: Final = {"logprobs": BOOLEAN, "max_tokens": integer(1, MAX_TOKENS)}
COMPLETION_FIELDS: Final = {"logprobs": integer(0, MAX_LOGPROBS), "max_tokens": integer(0, MAX_TOKENS)}
"""Fields that mean something else in each endpoint."""


def body(fields: Mapping[str, Schema], names: Set[str], ignored: Mapping[str, str], *required: str) -> Schema:
    """Return the schema of a request. A field that is not required may be null.

    Args:
        fields: the schemas of at least the fields in `names`.
        ignored: fields without effect -> why that is harmless.
    """
    properties = {name: fields[name] if name in required else or_null(fields[name]) for name in sorted(names)}
    for name, reason in sorted(ignored.items()):
        properties[name] = {"description": f"Accepted without effect: {reason}."}
    return closed(properties, *required)


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
        "permission": {"type": "array"},
    }
)
MODELS: Final = record({"object": {"const": "list"}, "data": array({"$ref": "#/components/schemas/Model"})})
PROBE: Final = record({"status": {"enum": ["ok", "unavailable"]}, "reason": STRING}, "reason")
