"""`POST /v2/rerank`, `/v1/rerank` and `/rerank`: one reader for the fields of Cohere, Jina and vLLM, and one answer.

A body with `texts` instead of `documents` is TEI's: see `tei.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from headrace_broker import RegisteredModel
from headrace_broker.pooling_results import Pooled, ranking_of
from headrace_gateway.pooling.pooling_body import (
    BOOLEAN,
    LOWEST_PRIORITY,
    TOKENS,
    VLLM_NAMES,
    BodyFields,
    PoolingApi,
    PoolingBody,
    activation_rules,
    cohere_meta,
    read_activation,
    read_truncation,
    truncation_rules,
    usage_of,
)
from headrace_gateway.pooling.tei import is_tei, read_tei_rerank
from headrace_wire.pooling import MAX_INPUTS, POOLING
from headrace_wire.rules import Integer, Rule, Schema
from headrace_wire.sampling import MAX_TOKEN_ID
from headrace_wire.values import shown

MOST_COHERE_PRIORITY: Final = 999


@dataclass(frozen=True, slots=True)
class Documents(Rule):
    """A list of texts, or of maps with a `text`."""

    def problem(self, path: str, value: Any) -> str | None:
        if not isinstance(value, list):
            return f"{path} must be a list of texts, got {shown(value)}"
        for index, each in enumerate(value):
            if isinstance(each, dict) and not isinstance(each.get("text"), str):
                return f"{path}[{index}].text must be a string, got {shown(each.get('text'))}"
        return POOLING["score"]["documents"].problem(path, texts_of(value))

    @property
    def schema(self) -> Schema:
        text: Schema = {"type": "string", "minLength": 1}
        record = {"type": "object", "properties": {"text": text}, "required": ["text"]}
        return {"type": "array", "items": {"anyOf": [text, record]}, "minItems": 1, "maxItems": MAX_INPUTS}


RULES: Final[Mapping[str, Rule]] = {
    "query": POOLING["score"]["query"],
    "documents": Documents(),
    "top_n": Integer(0, MAX_TOKEN_ID),
    "return_documents": BOOLEAN,
    "max_tokens_per_doc": TOKENS,
    "truncation": BOOLEAN,
    **truncation_rules(),
    **activation_rules(),
    "raw_scores": BOOLEAN,
    "priority": Integer(0, MOST_COHERE_PRIORITY),
}
REFUSED: Final = {
    "top_k": "use top_n",
    "texts": "give documents, or TEI's fields alone",
    "relevant_spans": "the answer has whole documents",
    "rank_fields": "put the text of a document into its field text",
    "max_chunks_per_doc": "long documents are truncated, not chunked",
    "max_tokens_per_query": "a long document is truncated, a query is not",
}


def texts_of(documents: Any) -> Any:
    """Return the texts of documents. Any other value stays unchanged."""
    if not isinstance(documents, list):
        return documents
    return [each.get("text") if isinstance(each, dict) else each for each in documents]


def read_rerank(body: Mapping[str, Any], *, model: RegisteredModel) -> PoolingBody:
    """Check the body. Raises ApiError that lists every problem."""
    if is_tei(body):
        return read_tei_rerank(body, model=model)
    body = {name: value for name, value in body.items() if name != "rank_fields" or value != ["text"]}
    fields = BodyFields(body, RULES, REFUSED)
    problems = fields.problems
    for name in ("query", "documents"):
        if fields.given.get(name) is None:
            problems.add(name, f"{name} must be given")
    given: dict[str, Any] = {"query": fields.get("query", "-"), "documents": texts_of(fields.get("documents", ["-"]))}
    given |= {"truncate": "error"} if fields.get("truncation") is False else {}
    given |= read_truncation(fields)
    given |= read_activation(fields)
    if fields.get("raw_scores") is not None:
        given["activation"] = not fields.get("raw_scores")
    limit, bound = model.max_input_tokens, fields.get("max_tokens_per_doc")
    if bound is not None and limit is not None and bound < limit:
        message = f"max_tokens_per_doc must be at least the model's limit of {limit} tokens, got {bound}"
        problems.add("max_tokens_per_doc", f"{message}: use truncate_prompt_tokens for query and document together")
    priority = fields.get("priority")
    return fields.body(
        model,
        "score",
        given,
        write_rerank,
        options={"top_n": fields.get("top_n"), "return_documents": fields.get("return_documents", False)},
        names=VLLM_NAMES,
        priority=None if priority is None else min(priority, LOWEST_PRIORITY),
    )


def write_rerank(body: PoolingBody, pooled: Pooled, answer_id: str) -> dict[str, Any]:
    """Return the answer, the best document first. `document` is present only if it was asked for."""
    documents = body.given["documents"]
    results: list[dict[str, Any]] = []
    for each in ranking_of(pooled.rows.tolist(), body.options["top_n"]):
        result: dict[str, Any] = {"index": each.index, "relevance_score": each.score}
        if body.options["return_documents"]:
            result["document"] = {"text": documents[each.index]}
        results.append(result)
    meta = cohere_meta(pooled, {"search_units": 1})
    return {
        "id": answer_id,
        "object": "list",
        "model": body.model,
        "results": results,
        "usage": usage_of(pooled),
        "meta": meta,
    }


RERANK: Final = PoolingApi("rerank-", "score", read_rerank)
