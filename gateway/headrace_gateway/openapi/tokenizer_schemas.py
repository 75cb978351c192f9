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
    answer,
    array,
    closed,
    either,
    integer,
    or_null,
)

_OWN: Final[dict[str, Schema]] = {
    "prompt": {"type": "string", "minLength": 1},
    "add_special_tokens": BOOLEAN,
    "return_token_strs": BOOLEAN,
}


def _body(served: frozenset[str], required: str) -> Schema:
    fields = {name: _OWN.get(name) or FIELDS[name] for name in sorted(served)}
    return closed({name: each if name == required else or_null(each) for name, each in fields.items()}, required)


TOKENIZE_REQUEST: Final = either(
    _body(field_tables.TOKENIZE_PROMPT, "prompt"), _body(field_tables.TOKENIZE_CHAT, "messages")
)
DETOKENIZE_REQUEST: Final = closed(
    {"model": or_null(STRING), "tokens": array(integer(0, rules.MAX_TOKEN_ID), maxItems=MAX_PROMPT_TOKENS)}, "tokens"
)


TOKENIZED: Final = answer(
    {"count": INTEGER, "max_model_len": INTEGER, "tokens": array(INTEGER), "token_strs": or_null(array(STRING))}
)
DETOKENIZED: Final = answer({"prompt": STRING})
RESPONSE_TOKENS: Final = answer({"object": {"const": "response.input_tokens"}, "input_tokens": INTEGER})
