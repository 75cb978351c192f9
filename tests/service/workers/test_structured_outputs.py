"""Structured outputs for a plain Celery producer: followed, or refused with the reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service.workers.service import Service, results

SCHEMA = {
    "type": "object",
    "properties": {"river": {"type": "string", "maxLength": 12}, "length": {"type": "integer", "maximum": 9999}},
    "required": ["river", "length"],
    "additionalProperties": False,
}


def generate(service: Service, structured_outputs: Any, **params: Any) -> dict[str, Any]:
    params = {"temperature": 1.0, "seed": 5, "max_tokens": 400, **params, "structured_outputs": structured_outputs}
    handle = service.send({"prompt": "the mill", "sampling_params": params})
    return results([handle], timeout=60)[handle.id]


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["map", "text"])
def test_a_schema_sent_through_the_queue_gives_json_that_matches_it(service: Service, schema: Any) -> None:
    answer = generate(service, {"json": schema, "disable_any_whitespace": True}, n=2)
    assert answer["error"] is None
    for output in answer["outputs"]:
        assert output["finish_reason"] == "stop"
        record = json.loads(output["text"])
        assert set(record) == {"river", "length"}
        assert len(record["river"]) <= 12
        assert record["length"] <= 9999


@pytest.mark.parametrize(
    ("structured_outputs", "reason"),
    [
        ({"regex": "(unclosed"}, "unclosed group"),
        ({"json": {"type": "integer", "multipleOf": 999983}}, "takes more than"),
        ({"regex": "((a{1,1000}){1,1000}){1,1000}"}, "structured_outputs: the grammar is too complex"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"structural_tag": "x"}, "'structural_tag'"),
        ({}, "exactly one of"),
    ],
)
def test_invalid_structured_outputs_are_refused_with_the_reason(
    service: Service, structured_outputs: Any, reason: str
) -> None:
    answer = generate(service, structured_outputs)
    assert answer["error"]["code"] == "invalid_request"
    assert reason in answer["error"]["message"]
    assert generate(service, {"choice": ["yes", "no"]})["outputs"][0]["text"] in ("yes", "no")
    assert "unclosed" not in service.workers[0].log_text()
