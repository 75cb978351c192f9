"""`POST /embed`, `/rerank` and `/predict` of Hugging Face's text-embeddings-inference (TEI), with its error bodies."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from headrace_broker import RegisteredModel
from headrace_broker.pooling_results import Pooled, ranking_of
from headrace_gateway.pooling.embeddings import TextsOrIds, as_list
from headrace_gateway.pooling.pooling_body import BOOLEAN, CUT_END, TOKENS, BodyFields, PoolingApi, PoolingBody
from headrace_wire.pooling import MAX_INPUTS, POOLING, Inputs
from headrace_wire.rules import OneOf, Rule, Schema
from headrace_wire.values import shown

_CUTS: Final[Mapping[str, Rule]] = {"truncate": BOOLEAN, "truncation_direction": OneOf(("Left", "Right"))}
EMBED_RULES: Final[Mapping[str, Rule]] = {
    "inputs": TextsOrIds(("text", "ids")),
    **_CUTS,
    "prompt_name": POOLING["embed"]["prompt_name"],
    "normalize": BOOLEAN,
    "dimensions": TOKENS,
}
RERANK_RULES: Final[Mapping[str, Rule]] = {
    "query": POOLING["score"]["query"],
    "texts": Inputs(("text",)),
    **_CUTS,
    "raw_scores": BOOLEAN,
    "return_text": BOOLEAN,
}


@dataclass(frozen=True, slots=True)
class _Predicted(Rule):
    """A text, a pair of texts, or a list of lists of one or two texts."""

    def problem(self, path: str, value: Any) -> str | None:
        inputs = predicted(value)
        if inputs is None:
            return f"{path} must be a text, a pair of texts, or a list of lists of one or two texts, got {shown(value)}"
        return POOLING["classify"]["input"].problem(path, inputs)

    @property
    def schema(self) -> Schema:
        text: Schema = {"type": "string", "minLength": 1}
        few = {"type": "array", "items": text, "minItems": 1, "maxItems": 2}
        return {"anyOf": [text, few, {"type": "array", "items": few, "minItems": 1, "maxItems": MAX_INPUTS}]}


_NAMES: Final = {"input": "inputs", "documents": "texts", CUT_END: "truncate: true"}
"""The queue's names of fields -> TEI's."""
PREDICT_RULES: Final[Mapping[str, Rule]] = {"inputs": _Predicted(), **_CUTS, "raw_scores": BOOLEAN}


def is_tei(body: Mapping[str, Any]) -> bool:
    """Return whether a body of `/rerank` has TEI's fields."""
    return body.get("texts") is not None and body.get("documents") is None


def predicted(value: Any) -> list[Any] | None:
    """Return the inputs of `/predict`: texts, and pairs as lists of two. None if the value has another form."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        return None
    lists = [value] if all(isinstance(each, str) for each in value) else value
    is_plain = all(
        isinstance(each, list) and len(each) in (1, 2) and all(isinstance(text, str) for text in each) for each in lists
    )
    return [each[0] if len(each) == 1 else each for each in lists] if is_plain else None


def read_tei_embed(body: Mapping[str, Any], *, model: RegisteredModel) -> PoolingBody:
    """Check the body. Raises ApiError that lists every problem."""
    fields = BodyFields(body, EMBED_RULES)
    given = _read_cut(fields) | fields.queue_options(
        {name: name for name in ("prompt_name", "normalize", "dimensions")}
    )
    return fields.body(model, "embed", given | _inputs(fields, as_list), write_tei_embed, names=_NAMES)


def read_tei_rerank(body: Mapping[str, Any], *, model: RegisteredModel) -> PoolingBody:
    """Check the body. Raises ApiError that lists every problem."""
    fields = BodyFields(body, RERANK_RULES)
    given = _read_cut(fields) | {"query": fields.get("query", "-"), "documents": fields.get("texts", ["-"])}
    if fields.given.get("query") is None:
        fields.problems.add("query", "query must be given")
    given["activation"] = not fields.get("raw_scores", False)
    given["documents"] = [given["documents"]] if isinstance(given["documents"], str) else given["documents"]
    options = {"return_text": fields.get("return_text", False)}
    return fields.body(model, "score", given, write_tei_rerank, options=options, names=_NAMES)


def read_predict(body: Mapping[str, Any], *, model: RegisteredModel) -> PoolingBody:
    """Check the body. Raises ApiError that lists every problem."""
    fields = BodyFields(body, PREDICT_RULES)
    given = _read_cut(fields) | {"activation": not fields.get("raw_scores", False)} | _inputs(fields, predicted)
    inputs = fields.given.get("inputs")
    is_batch = isinstance(inputs, list) and any(isinstance(each, list) for each in inputs)
    options = {"is_batch": is_batch}
    return fields.body(model, "classify", given, write_predict, options=options, names=_NAMES)


def write_tei_embed(_body: PoolingBody, pooled: Pooled, _answer_id: str) -> list[list[float]]:
    """Return one list for each input, even for a single text."""
    return pooled.rows.tolist()


def write_tei_rerank(body: PoolingBody, pooled: Pooled, _answer_id: str) -> list[dict[str, Any]]:
    """Return the texts' scores, the best first."""
    texts = body.given["documents"]
    return [
        {
            "index": each.index,
            "score": each.score,
            **({"text": texts[each.index]} if body.options["return_text"] else {}),
        }
        for each in ranking_of(pooled.rows.tolist(), None)
    ]


def write_predict(body: PoolingBody, pooled: Pooled, _answer_id: str) -> list[Any]:
    """Return the classes of the input, the most probable first, or a list of these for a batch."""
    found = [
        sorted(
            ({"score": score, "label": label} for score, label in zip(row, pooled.labels, strict=True)),
            key=lambda each: -each["score"],
        )
        for row in pooled.rows.tolist()
    ]
    return found if body.options["is_batch"] else found[0]


def _inputs(fields: BodyFields, read: Any) -> dict[str, Any]:
    if fields.given.get("inputs") is None:
        return {}
    return {"input": ["-"] if fields.get("inputs") is None else read(fields.get("inputs"))}


def _read_cut(fields: BodyFields) -> dict[str, Any]:
    if not fields.get("truncate", False):
        return {"truncate": "error"}
    return {"truncate": "start" if fields.get("truncation_direction") == "Left" else "end"}


TEI_EMBED: Final = PoolingApi("embed-", "embed", read_tei_embed, is_tei=True)
TEI_PREDICT: Final = PoolingApi("predict-", "classify", read_predict, is_tei=True)
