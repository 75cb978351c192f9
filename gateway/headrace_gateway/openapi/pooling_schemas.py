"""JSON Schemas of embeddings, rerank, score and classify."""

from collections.abc import Mapping
from typing import Final

from headrace_gateway.openapi.schemas import INTEGER, NUMBER, STRING, Schema, array, body, either, record
from headrace_gateway.pooling import embeddings
from headrace_gateway.pooling.call import IGNORED
from headrace_wire.rules import Rule

ENDPOINTS: Final = {
    **dict.fromkeys(("/v1/embeddings", "/embeddings"), ("EmbeddingRequest", "Embeddings")),
}
"""Path -> the schemas of its request and of its answer."""


def _request(rules: Mapping[str, Rule], *required: str) -> Schema:
    own = {"model": STRING, **{name: rule.schema for name, rule in rules.items()}}
    return body(own, own.keys(), IGNORED, "model", *required)


_VECTOR: Final = array(NUMBER)
_USAGE: Final = record({"prompt_tokens": INTEGER, "total_tokens": INTEGER})
_EMBEDDING: Final = record({"object": {"const": "embedding"}, "index": INTEGER, "embedding": either(_VECTOR, STRING)})
SCHEMAS: Final[Mapping[str, Schema]] = {
    "EmbeddingRequest": _request(embeddings.RULES, "input"),
    "Embeddings": record({"object": {"const": "list"}, "data": array(_EMBEDDING), "model": STRING, "usage": _USAGE}),
}
