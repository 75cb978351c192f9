"""`POST /classify` and `/v1/classify`: vLLM's API."""

from collections.abc import Mapping
from typing import Any, Final

from headrace_broker import RegisteredModel
from headrace_broker.pooling_results import Pooled
from headrace_gateway.pooling.embeddings import TextsOrIds, as_list
from headrace_gateway.pooling.pooling_body import (
    LOWEST_PRIORITY,
    VLLM_NAMES,
    BodyFields,
    PoolingApi,
    PoolingBody,
    activation_rules,
    read_activation,
    read_truncation,
    truncation_rules,
    vllm_answer,
)
from headrace_wire.rules import Integer, Rule

RULES: Final[Mapping[str, Rule]] = {
    "input": TextsOrIds(("text", "ids")),
    **truncation_rules(),
    **activation_rules(),
    "priority": Integer(0, LOWEST_PRIORITY),
}
REFUSED: Final = {"messages": "send their text in input"}


def read_classify(body: Mapping[str, Any], *, model: RegisteredModel) -> PoolingBody:
    """Check the body. Raises ApiError that lists every problem."""
    fields = BodyFields(body, RULES, REFUSED)
    given = read_truncation(fields) | read_activation(fields)
    if (inputs := fields.given.get("input")) is not None:
        given["input"] = ["-"] if fields.get("input") is None else as_list(inputs)
    return fields.body(
        model,
        "classify",
        given,
        write_classify,
        names=VLLM_NAMES,
        priority=fields.get("priority"),
    )


def write_classify(body: PoolingBody, pooled: Pooled, answer_id: str) -> dict[str, Any]:
    """Return the answer, in the order of the inputs."""
    data = []
    for index, probs in enumerate(pooled.rows.tolist()):
        best = max(range(len(probs)), key=probs.__getitem__)
        label = pooled.labels[best] if pooled.labels else None
        data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
    return vllm_answer(body, pooled, answer_id, data)


CLASSIFY: Final = PoolingApi("classify-", "classify", read_classify)
