"""`POST /v1/embeddings`: OpenAI's API with vLLM's extra fields."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from headrace_broker import RegisteredModel
from headrace_broker.pooling_results import Pooled
from headrace_gateway.pooling.pooling_body import (
    BOOLEAN,
    LOWEST_PRIORITY,
    TOKENS,
    VLLM_NAMES,
    BodyFields,
    PoolingApi,
    PoolingBody,
    read_truncation,
    truncation_rules,
    usage_of,
)
from headrace_wire.pooling import POOLING, Inputs, kind_of
from headrace_wire.rules import Integer, OneOf, Rule, Schema
from headrace_wire.values import is_integer

_LAYOUT: Final = "base64 holds little-endian float32"


@dataclass(frozen=True, slots=True)
class TextsOrIds(Inputs):
    """A text, token ids, a list of texts, or a list of lists of token ids."""

    def problem(self, path: str, value: Any) -> str | None:
        return Inputs.problem(self, path, as_list(value))

    @property
    def schema(self) -> Schema:
        texts: Schema = Inputs.schema.fget(self)  # type: ignore[attr-defined]
        ids = next(each["items"] for each in texts["anyOf"] if each.get("items", {}).get("type") == "array")
        return {"anyOf": [*texts["anyOf"], ids]}


def as_list(value: Any) -> Any:
    """Return a list with one input for bare token ids; any other value as it is."""
    return [value] if isinstance(value, list) and value and is_integer(value[0]) else value


RULES: Final[Mapping[str, Rule]] = {
    "input": TextsOrIds(("text", "ids")),
    "encoding_format": OneOf(("float", "base64")),
    "dimensions": TOKENS,
    **truncation_rules(),
    "add_special_tokens": BOOLEAN,
    "normalize": BOOLEAN,
    "prompt": POOLING["embed"]["prompt"],
    "prompt_name": POOLING["embed"]["prompt_name"],
    "priority": Integer(0, LOWEST_PRIORITY),
}
REFUSED: Final = {
    "messages": "send their text in input",
    "embed_dtype": _LAYOUT,
    "endianness": _LAYOUT,
    "output_dtype": _LAYOUT,
    "output_dimension": "use dimensions",
    "input_type": "use prompt_name",
}
_OPTIONS: Final = {name: name for name in ("dimensions", "add_special_tokens", "normalize", "prompt", "prompt_name")}


def read_embeddings(body: Mapping[str, Any], *, model: RegisteredModel) -> PoolingBody:
    """Check the body. Raises ApiError that lists every problem."""
    fields = BodyFields(body, RULES, REFUSED)
    inputs = as_list(fields.given.get("input"))
    given = {**fields.queue_options(_OPTIONS), **read_truncation(fields)}
    if isinstance(inputs, list) and inputs and kind_of(inputs[0]) == "ids":
        given.pop("add_special_tokens", None)  # the ids are the whole input
    if inputs is not None:
        given["input"] = inputs
    return fields.body(
        model,
        "embed",
        given,
        write_embeddings,
        options={"encoding_format": fields.get("encoding_format", "float")},
        names=VLLM_NAMES,
        priority=fields.get("priority"),
    )


def write_embeddings(body: PoolingBody, pooled: Pooled, _answer_id: str) -> dict[str, Any]:
    """Return the answer, in the order of the inputs."""
    is_base64 = body.options["encoding_format"] == "base64"
    rows = base64_rows(pooled) if is_base64 else pooled.rows.tolist()
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
    return {"object": "list", "data": data, "model": body.model, "usage": usage_of(pooled)}


def base64_rows(pooled: Pooled) -> list[str]:
    """Return each row as base64 of little-endian float32."""
    data = memoryview(pooled.rows.data)
    size = len(data) // len(pooled.rows)
    return [base64.b64encode(data[first : first + size]).decode() for first in range(0, len(data), size)]


EMBEDDINGS: Final = PoolingApi("embd-", "embed", read_embeddings)
