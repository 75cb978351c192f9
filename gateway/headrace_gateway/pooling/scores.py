"""`POST /score` and `/v1/score`: vLLM's API for pairs of texts."""

from collections.abc import Mapping
from typing import Any, Final

from headrace_broker import RegisteredModel
from headrace_broker.pooling_results import Pooled
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
from headrace_wire.pooling import POOLING
from headrace_wire.rules import Integer, Rule

PAIRS: Final = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""vLLM's names of the two sides."""
RULES: Final[Mapping[str, Rule]] = {
    **{name: POOLING["score"]["documents"] for pair in PAIRS for name in pair},
    **truncation_rules(),
    **activation_rules(),
    "priority": Integer(0, LOWEST_PRIORITY),
}


def read_score(body: Mapping[str, Any], *, model: RegisteredModel) -> PoolingBody:
    """Check the body. Raises ApiError that lists every problem."""
    fields = BodyFields(body, RULES)
    given: dict[str, Any] = {"queries": ["-"], "documents": ["-"]}
    sides = [name for name in dict.fromkeys(name for pair in PAIRS for name in pair) if name in fields.given]
    pair = next((pair for pair in PAIRS if set(pair) == set(sides)), None)
    if pair is None:
        told = " and ".join(sides) or "none"
        message = f"exactly one pair of {', '.join('/'.join(pair) for pair in PAIRS)} must be given, got {told}"
        fields.problems.add(sides[0] if sides else "text_1", message)
    else:
        firsts, seconds = (_listed(fields.get(name, ["-"])) for name in pair)
        if len(firsts) not in (1, len(seconds)):
            message = f"{pair[0]} has {len(firsts)} texts, {pair[1]} {len(seconds)}: both must have as many, or"
            fields.problems.add(pair[0], f"{message} {pair[0]} one")
        else:
            given = {"queries": firsts, "documents": seconds}
    first, second = pair or PAIRS[0]
    return fields.body(
        model,
        "score",
        given | read_truncation(fields) | read_activation(fields),
        write_score,
        names={**VLLM_NAMES, "queries": first, "documents": second},
        priority=fields.get("priority"),
    )


def write_score(body: PoolingBody, pooled: Pooled, answer_id: str) -> dict[str, Any]:
    """Return the answer, in the order of the pairs."""
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(pooled.rows.tolist())]
    return vllm_answer(body, pooled, answer_id, data)


def _listed(side: Any) -> list[str]:
    return [side] if isinstance(side, str) else side


SCORE: Final = PoolingApi("score-", "score", read_score)
