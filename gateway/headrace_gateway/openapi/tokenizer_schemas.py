"""JSON Schemas of the endpoints that call a model's tokenizer."""

from typing import Final

from headrace_gateway.openapi.schemas import (
    BOOLEAN,
    FIELDS,
    INTEGER,
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
from headrace_wire.request import TOKENS

_FIELDS: Final[dict[str, Schema]] = {
    **FIELDS,
    "prompt": STRING,
    "add_special_tokens": BOOLEAN,
    "return_token_strs": BOOLEAN,
}
TOKENIZE_REQUEST: Final = either(
    body(_FIELDS, field_tables.TOKENIZE_PROMPT, {}, "prompt"),
    body(_FIELDS, field_tables.TOKENIZE_CHAT, {}, "messages"),
)
DETOKENIZE_REQUEST: Final = fields({"model": or_null(STRING), "tokens": TOKENS.schema}, "tokens")
TOKENIZED: Final = record(
    {"count": INTEGER, "max_model_len": INTEGER, "tokens": array(INTEGER), "token_strs": or_null(array(STRING))}
)
DETOKENIZED: Final = record({"prompt": STRING})
RESPONSE_TOKENS: Final = record({"object": {"const": "response.input_tokens"}, "input_tokens": INTEGER})
