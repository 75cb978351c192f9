"""JSON Schemas of the endpoints that call a model's tokenizer."""

from typing import Final

from headrace_broker import sampling_rules as rules
from headrace_broker.messages import MAX_PROMPT_TOKENS
from headrace_gateway import field_tables
from headrace_gateway.openapi.schemas import (
    BOOLEAN,
    FIELDS,
    INTEGER,
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

_FIELDS: Final[dict[str, Schema]] = {
    **FIELDS,
    "prompt": {"type": "string", "minLength": 1},
    "add_special_tokens": BOOLEAN,
    "return_token_strs": BOOLEAN,
}
TOKENIZE_REQUEST: Final = either(
    body(_FIELDS, field_tables.TOKENIZE_PROMPT, {}, "prompt"),
    body(_FIELDS, field_tables.TOKENIZE_CHAT, {}, "messages"),
)
DETOKENIZE_REQUEST: Final = closed(
    {"model": or_null(STRING), "tokens": array(integer(0, rules.MAX_TOKEN_ID), maxItems=MAX_PROMPT_TOKENS)}, "tokens"
)
TOKENIZED: Final = record(
    {"count": INTEGER, "max_model_len": INTEGER, "tokens": array(INTEGER), "token_strs": or_null(array(STRING))}
)
DETOKENIZED: Final = record({"prompt": STRING})
RESPONSE_TOKENS: Final = record({"object": {"const": "response.input_tokens"}, "input_tokens": INTEGER})
