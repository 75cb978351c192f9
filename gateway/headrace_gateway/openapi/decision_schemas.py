"""JSON Schemas of decisions."""

from collections.abc import Mapping
from typing import Final

from headrace_gateway.decisions.fields import RULES
from headrace_gateway.openapi.schemas import INTEGER, NUMBER, STRING, Schema, array, body, either, or_null, record
from headrace_gateway.pooling.pooling_body import IGNORED

_NAME: Final = {"name": or_null(STRING)}
_SHARE: Final = {"probability": NUMBER}
_VALUE: Final = either(STRING, {"type": "boolean"})
_PREDICATE: Final = record({"type": {"const": "predicate"}, **_NAME, **_SHARE})
_CHOICE: Final = record(
    {
        "type": {"const": "choice"},
        **_NAME,
        "choice": _VALUE,
        "confidence": NUMBER,
        "probabilities": array(record({"value": _VALUE, **_SHARE})),
    }
)
_SCORE: Final = record(
    {
        "type": {"const": "score"},
        **_NAME,
        "score": NUMBER,
        "confidence": NUMBER,
        "probabilities": array(record({"label": STRING, "value": INTEGER, **_SHARE})),
    }
)
_USAGE: Final = record(
    {
        "input_tokens": INTEGER,
        "input_tokens_details": record({"cache_write_tokens": INTEGER, "cached_tokens": INTEGER}),
        "output_tokens": INTEGER,
        "output_tokens_details": record({"reasoning_tokens": INTEGER}),
        "total_tokens": INTEGER,
    }
)
_ITEMS: Final[Schema] = {"type": "array", "items": {"type": "object"}, "minItems": 1}
_RULES: Final = {"model": STRING, **{name: rule.schema for name, rule in RULES.items()}}

SCHEMAS: Final[Mapping[str, Schema]] = {
    "DecisionRequest": body(
        {**_RULES, "input": either({"type": "string", "minLength": 1}, _ITEMS)},
        _RULES.keys(),
        IGNORED,
        "model",
        "input",
        "questions",
    ),
    "Decision": record({"model": STRING, "answers": array(either(_PREDICATE, _CHOICE, _SCORE)), "usage": _USAGE}),
}
