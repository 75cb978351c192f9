"""JSON Schemas of embeddings, rerank, score and classify."""

from collections.abc import Mapping
from typing import Final

from headrace_gateway.openapi.schemas import (
    ERROR,
    INTEGER,
    NUMBER,
    STRING,
    Schema,
    array,
    body,
    either,
    or_null,
    record,
)
from headrace_gateway.pooling import classes, cohere, embeddings, rerank, scores, tei
from headrace_gateway.pooling.pooling_body import IGNORED
from headrace_wire.rules import Rule

ENDPOINTS: Final[Mapping[str, tuple[str, str, str]]] = {
    **dict.fromkeys(("/v1/embeddings", "/embeddings"), ("EmbeddingRequest", "Embeddings", "Error")),
    "/v2/embed": ("EmbedRequest", "EmbeddingsByType", "Error"),
    "/v1/embed": ("EmbedRequest", "EmbeddingsOfV1", "Error"),
    **dict.fromkeys(("/v2/rerank", "/v1/rerank"), ("RerankRequest", "Ranking", "RerankError")),
    "/rerank": ("RerankRequest", "Ranking", "RerankError"),
    **dict.fromkeys(("/v1/score", "/score"), ("ScoreRequest", "Scores", "Error")),
    **dict.fromkeys(("/v1/classify", "/classify"), ("ClassifyRequest", "Classes", "Error")),
    "/embed": ("TeiEmbedRequest", "TeiEmbeddings", "TeiError"),
    "/predict": ("TeiPredictRequest", "TeiPrediction", "TeiError"),
}
"""Path -> the schemas of its request, its answer and its errors."""


def _request(rules: Mapping[str, Rule], *required: str) -> Schema:
    own = {"model": STRING, **{name: rule.schema for name, rule in rules.items()}}
    return body(own, own.keys(), IGNORED, *required)


_VECTOR: Final = array(NUMBER)
_USAGE: Final = record({"prompt_tokens": INTEGER, "total_tokens": INTEGER})
_EMBEDDING: Final = record({"object": {"const": "embedding"}, "index": INTEGER, "embedding": either(_VECTOR, STRING)})
_BY_TYPE: Final = {
    "float": array(_VECTOR),
    "binary": array(array(INTEGER)),
    "ubinary": array(array(INTEGER)),
    "base64": array(STRING),
}
_META: Final = record({"api_version": record({"version": STRING}), "billed_units": {}, "tokens": {}})
_DOCUMENT: Final = record(
    {"index": INTEGER, "relevance_score": NUMBER, "document": record({"text": STRING})}, "document"
)
_PREDICTED: Final = array(record({"score": NUMBER, "label": STRING}))


def _list(item: Schema) -> Schema:
    head = {"id": STRING, "object": {"const": "list"}, "created": INTEGER, "model": STRING}
    return record({**head, "data": array(item), "usage": _USAGE})


_RANKING: Final = record(
    {
        "id": STRING,
        "object": {"const": "list"},
        "model": STRING,
        "results": array(_DOCUMENT),
        "usage": _USAGE,
        "meta": _META,
    }
)
_TEI_ERROR: Final = record({"error": STRING, "error_type": STRING})


def _cohere_embeddings(kind: str, embeddings: Schema) -> Schema:
    own = {"id": STRING, "embeddings": embeddings, "texts": array(STRING), "response_type": {"const": kind}}
    return record({**own, "meta": _META})


_COHERE_BY_TYPE: Final = _cohere_embeddings("embeddings_by_type", record(_BY_TYPE, *_BY_TYPE))
SCHEMAS: Final[Mapping[str, Schema]] = {
    "EmbeddingRequest": _request(embeddings.RULES, "model", "input"),
    "EmbedRequest": _request(cohere.RULES, "model"),
    "RerankRequest": either(
        _request(rerank.RULES, "model", "query", "documents"), _request(tei.RERANK_RULES, "query", "texts")
    ),
    "ScoreRequest": _request(scores.RULES, "model"),
    "ClassifyRequest": _request(classes.RULES, "model", "input"),
    "TeiEmbedRequest": _request(tei.EMBED_RULES, "inputs"),
    "TeiPredictRequest": _request(tei.PREDICT_RULES, "inputs"),
    "Embeddings": record({"object": {"const": "list"}, "data": array(_EMBEDDING), "model": STRING, "usage": _USAGE}),
    "EmbeddingsByType": _COHERE_BY_TYPE,
    "EmbeddingsOfV1": either(_COHERE_BY_TYPE, _cohere_embeddings("embeddings_floats", array(_VECTOR))),
    "Ranking": either(_RANKING, array(record({"index": INTEGER, "score": NUMBER, "text": STRING}, "text"))),
    "Scores": _list(record({"index": INTEGER, "object": {"const": "score"}, "score": NUMBER})),
    "Classes": _list(record({"index": INTEGER, "label": or_null(STRING), "probs": _VECTOR, "num_classes": INTEGER})),
    "TeiEmbeddings": array(_VECTOR),
    "TeiPrediction": either(_PREDICTED, array(_PREDICTED)),
    "TeiError": _TEI_ERROR,
    "RerankError": either(ERROR, _TEI_ERROR),
}
