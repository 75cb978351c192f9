"""`POST /v2/embed` and `/v1/embed`: Cohere's API."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from headrace_broker import RegisteredModel
from headrace_broker.pooling_results import Pooled
from headrace_gateway.pooling.embeddings import base64_rows
from headrace_gateway.pooling.pooling_body import (
    CUT_END,
    LOWEST_PRIORITY,
    TOKENS,
    BodyFields,
    PoolingApi,
    PoolingBody,
    cohere_meta,
    within_limit,
)
from headrace_wire.pooling import MAX_INPUTS, POOLING
from headrace_wire.rules import Integer, OneOf, Rule, Schema
from headrace_wire.values import named, shown

TRUNCATE: Final = {"NONE": "error", "START": "start", "END": "end"}
PROMPTS: Final = {
    "search_query": ("query", "search_query"),
    "search_document": ("document", "passage", "corpus", "search_document"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""`input_type` -> the names that folders give to its prompt."""
_NO_RANGES: Final = "needs the model's ranges, which its folder does not have; use binary or float"


@dataclass(frozen=True, slots=True)
class _EmbeddingTypes(Rule):
    def problem(self, path: str, value: Any) -> str | None:
        if not isinstance(value, list) or not value:
            return f"{path} must be a list of {', '.join(_ROWS)}, got {shown(value)}"
        for index, kind in enumerate(value):
            if kind in ("int8", "uint8"):
                return f"{path}[{index}] is not supported: {kind} {_NO_RANGES}"
            if not isinstance(kind, str) or kind not in _ROWS:
                return f"{path}[{index}] must be one of {', '.join(_ROWS)}, got {named(kind)}"
        return None

    @property
    def schema(self) -> Schema:
        return {"type": "array", "items": {"enum": [*_ROWS]}, "minItems": 1}


@dataclass(frozen=True, slots=True)
class _TextInputs(Rule):
    """A list of maps with `content`, a list of parts of the type text."""

    def problem(self, path: str, value: Any) -> str | None:
        if not isinstance(value, list):
            return f"{path} must be a list, got {shown(value)}"
        for index, each in enumerate(value):
            parts = each.get("content") if isinstance(each, dict) else None
            if not isinstance(parts, list) or not parts:
                return f"{path}[{index}].content must be a list of parts, got {shown(parts)}"
            for number, part in enumerate(parts):
                if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    return f"{path}[{index}].content[{number}] must be a part of the type text: only text is supported"
        return POOLING["classify"]["input"].problem(path, _texts(value))

    @property
    def schema(self) -> Schema:
        part = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string", "minLength": 1}}}
        part["required"] = ["type", "text"]
        content = {"type": "array", "items": part, "minItems": 1}
        one = {"type": "object", "properties": {"content": content}, "required": ["content"]}
        return {"type": "array", "items": one, "minItems": 1, "maxItems": MAX_INPUTS}


RULES: Final[Mapping[str, Rule]] = {
    "texts": POOLING["score"]["documents"],
    "inputs": _TextInputs(),
    "input_type": OneOf(tuple(PROMPTS)),
    "embedding_types": _EmbeddingTypes(),
    "output_dimension": TOKENS,
    "truncate": OneOf(tuple(TRUNCATE)),
    "max_tokens": TOKENS,
    "priority": Integer(0, 999),
}


def read_embed(body: Mapping[str, Any], *, model: RegisteredModel) -> PoolingBody:
    """Check the body. Raises ApiError that lists every problem."""
    fields = BodyFields(body, RULES)
    sides = [name for name in ("texts", "inputs") if name in fields.given]
    texts: Any = ["-"]
    if len(sides) != 1:
        message = f"exactly one of texts, inputs must be given, got {' and '.join(sides) or 'none'}"
        fields.problems.add(sides[0] if sides else "texts", message)
    elif (found := fields.get(sides[0])) is not None:
        texts = _texts(found) if sides[0] == "inputs" else [found] if isinstance(found, str) else found
    dimensions = fields.get("output_dimension")
    width = dimensions or model.dimensions
    kinds = fields.get("embedding_types", ["float"])
    if width is not None and width % 8 and {"binary", "ubinary"} & set(kinds):
        message = f"embedding_types binary and ubinary require a multiple of 8 dimensions, the embeddings have {width}"
        fields.problems.add("embedding_types", message)
    given = {"input": texts, "truncate": TRUNCATE[fields.get("truncate", "END")]}
    given |= within_limit(fields.get("max_tokens"), model)
    given |= {"dimensions": dimensions} if dimensions is not None else {}
    names = PROMPTS.get(fields.get("input_type"), ())
    given |= next(({"prompt_name": name} for name in names if name in model.prompts), {})
    priority = fields.get("priority")
    return fields.body(
        model,
        "embed",
        given,
        write_embed,
        options={"embedding_types": kinds},
        names={
            "input": sides[0] if sides else "texts",
            "dimensions": "output_dimension",
            CUT_END: 'truncate: "END"',
        },
        priority=None if priority is None else min(priority, LOWEST_PRIORITY),
    )


def read_embed_v1(body: Mapping[str, Any], *, model: RegisteredModel) -> PoolingBody:
    """Check a body of the first version, whose answer has plain rows unless `embedding_types` asks for types."""
    read = read_embed(body, model=model)
    return read if body.get("embedding_types") is not None else replace(read, write=write_rows)


def write_embed(body: PoolingBody, pooled: Pooled, answer_id: str) -> dict[str, Any]:
    """Return the answer with the embeddings by type, in the order of the texts."""
    return {
        "id": answer_id,
        "embeddings": {kind: _ROWS[kind](pooled) for kind in dict.fromkeys(body.options["embedding_types"])},
        "texts": [*body.given["input"]],
        "response_type": "embeddings_by_type",
        "meta": cohere_meta(pooled, {"input_tokens": pooled.usage.prompt_tokens}),
    }


def write_rows(body: PoolingBody, pooled: Pooled, answer_id: str) -> dict[str, Any]:
    """Return the answer of the first version with one list of rows."""
    answer = write_embed(body, pooled, answer_id)
    return answer | {"embeddings": answer["embeddings"]["float"], "response_type": "embeddings_floats"}


def _texts(inputs: Any) -> list[str]:
    return ["".join(part["text"] for part in each["content"]) for each in inputs]


def _ubinary(pooled: Pooled) -> list[list[int]]:
    """Return the sign bits of each row, eight a byte, the first number in the most significant bit."""
    return [
        [
            sum((number > 0) << (7 - bit) for bit, number in enumerate(row[first : first + 8]))
            for first in range(0, len(row), 8)
        ]
        for row in pooled.rows.tolist()
    ]


def _binary(pooled: Pooled) -> list[list[int]]:
    return [[byte - 128 for byte in row] for row in _ubinary(pooled)]


_ROWS: Final[Mapping[str, Callable[[Pooled], list[Any]]]] = {
    "float": lambda pooled: pooled.rows.tolist(),
    "binary": _binary,
    "ubinary": _ubinary,
    "base64": base64_rows,
}
"""Type of embeddings -> their rows."""
COHERE_EMBED: Final = PoolingApi("embed-", "embed", read_embed)
COHERE_EMBED_V1: Final = PoolingApi("embed-", "embed", read_embed_v1)
