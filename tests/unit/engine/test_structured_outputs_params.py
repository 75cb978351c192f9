"""StructuredOutputsParams: what is refused before any grammar is compiled, and what survives the wire."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from headrace_engine.errors import InvalidRequestError
from headrace_engine.requests.sampling_params import SamplingParams, StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "must hold exactly one of json, regex, choice, grammar, json_object, got none"),
        ({"regex": "a", "choice": ["a"]}, "json_object, got regex and choice"),
        ({"json_object": False}, "json_object must be true, got false"),
        ({"regex": ""}, "regex must be a string of 1 to 65536 characters, got 0"),
        ({"regex": 5}, "regex must be a string, got 5"),
        ({"regex": "\ud800"}, "regex must be valid Unicode text, got a lone surrogate"),
        ({"regex": "a" * 65537}, "regex must be a string of 1 to 65536 characters, got 65537"),
        ({"grammar": "é" * 32769}, "grammar must have at most 65536 bytes, got 65538"),
        ({"choice": []}, "choice must hold 1 to 1024 strings, got 0"),
        ({"choice": "ab"}, "choice must be a list of strings, got a string of length 2"),
        ({"choice": ["a", ""]}, "choice[1] must be a string of at least 1 characters, got 0"),
        ({"choice": ["a"] * 1025}, "choice must hold 1 to 1024 strings, got 1025"),
        ({"choice": ["a\x00"]}, "choice must hold no control characters other than tabs and line breaks"),
        ({"choice": ["a" * 65536, "b"]}, "choice must have at most 65536 bytes, got 65537"),
        ({"json": "{"}, "json must be a JSON Schema, as a map or a string: Expecting property name"),
        ({"json": "[1]"}, "json must be a JSON Schema that is a map, got a list"),
        ({"json": 5}, "json must be a JSON Schema, as a map or a string, got 5"),
        ({"json": {"minimum": float("nan")}}, "json must be a JSON Schema, as a map or a string: "),
        ({"json": {"x": b"bytes"}}, "json must be a JSON Schema, as a map or a string: "),
        ({"json": {"description": "x" * 65536}}, "json must have at most 65536 bytes, got"),
        ({"json": '{"a":' * 20_000 + "1" + "}" * 20_000}, "json must have at most 65536 bytes, got 120001"),
        ({"json": '{"a":' * 9_000 + "1" + "}" * 9_000}, "json must be a JSON Schema that is not too deeply nested"),
        (
            {"regex": "a", "disable_any_whitespace": True},
            "disable_any_whitespace must be absent without json or json_object",
        ),
        ({"choice": ["a"], "whitespace_pattern": " "}, "whitespace_pattern must be absent without json or json_object"),
        (
            {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
            "whitespace_pattern must be absent when disable_any_whitespace is true",
        ),
        ({"json": {}, "disable_any_whitespace": 1}, "disable_any_whitespace must be true or false, got 1"),
        ({"structural_tag": "x", "json": {}}, "got 'structural_tag'"),
        ({"disable_additional_properties": True, "json": {}}, "got 'disable_additional_properties'"),
    ],
)
def test_a_wrong_form_is_refused_with_its_reason(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(structured_outputs=values)  # type: ignore[arg-type]
    assert any(sentence in problem for problem in refused.value.problems), refused.value.problems
    assert all(problem.startswith("structured_outputs") for problem in refused.value.problems)
    assert len(str(refused.value)) < 1000


def test_its_problems_are_named_beside_those_of_the_other_parameters() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(structured_outputs={"regex": ""}, top_p=2.0)  # type: ignore[arg-type]
    assert len(refused.value.problems) == 2
    with pytest.raises(InvalidRequestError, match="structured_outputs must be a map, got a list"):
        SamplingParams(structured_outputs=[SCHEMA])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "structured",
    [
        StructuredOutputsParams(json=SCHEMA),
        StructuredOutputsParams(json='{"type": "integer"}', disable_any_whitespace=True),
        StructuredOutputsParams(json_object=True, whitespace_pattern=" ?"),
        StructuredOutputsParams(regex="a+"),
        StructuredOutputsParams(choice=["a", "Größe\n"]),
        StructuredOutputsParams(grammar='start: "a"'),
    ],
)
def test_it_survives_the_wire(structured: StructuredOutputsParams) -> None:
    params = SamplingParams(structured_outputs=structured)
    sent = msgpack.unpackb(msgpack.packb(params.to_dict()))
    assert SamplingParams.from_dict(sent) == params
    assert SamplingParams.from_wire(sent) == params


def test_a_schema_is_kept_as_text() -> None:
    assert StructuredOutputsParams(json=SCHEMA).json == '{"type": "object", "properties": {"a": {"type": "integer"}}}'
