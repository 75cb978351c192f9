"""StructuredOutputsParams: what is refused before any grammar is compiled, and what survives the wire."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from headrace_engine.errors import InvalidRequestError
from headrace_engine.sampling_params import SamplingParams, StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "nothing is given, expected exactly one of json, regex, choice, grammar, json_object"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice is given, expected exactly one of"),
        ({"json_object": False}, "json_object is False, expected true"),
        ({"regex": ""}, "regex must be a text that is not empty"),
        ({"regex": 5}, "regex must be a text that is not empty"),
        ({"regex": "\ud800"}, "regex is no valid Unicode: it holds a lone surrogate"),
        ({"regex": "a" * 65537}, "regex has 65537 bytes, the limit is 65536"),
        ({"grammar": "é" * 32769}, "grammar has 65538 bytes, the limit is 65536"),
        ({"choice": []}, "choice must be a list of texts, none of them empty"),
        ({"choice": "ab"}, "choice must be a list of texts, none of them empty"),
        ({"choice": ["a", ""]}, "choice must be a list of texts, none of them empty"),
        ({"choice": ["a"] * 1025}, "choice holds 1025 texts, the limit is 1024"),
        ({"choice": ["a\x00"]}, "choice holds control characters other than tab and line ends"),
        ({"choice": ["a" * 65536, "b"]}, "choice has 65537 bytes, the limit is 65536"),
        ({"json": "{"}, "json is no valid JSON: Expecting property name"),
        ({"json": "[1]"}, "json must be a JSON schema that is a map"),
        ({"json": 5}, "json must be a JSON schema: a map, or its text"),
        ({"json": {"minimum": float("nan")}}, "json is no valid JSON"),
        ({"json": {"x": b"bytes"}}, "json is no valid JSON"),
        ({"json": {"description": "x" * 65536}}, "the limit is 65536"),
        ({"json": '{"a":' * 20_000 + "1" + "}" * 20_000}, "json has 120001 bytes"),
        ({"json": '{"a":' * 9_000 + "1" + "}" * 9_000}, "json is nested too deeply"),
        ({"regex": "a", "disable_any_whitespace": True}, "go with json and json_object only"),
        ({"choice": ["a"], "whitespace_pattern": " "}, "go with json and json_object only"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "contradict each other"),
        ({"json": {}, "disable_any_whitespace": 1}, "disable_any_whitespace is 1, expected true or false"),
        ({"structural_tag": "x", "json": {}}, "'structural_tag' is not supported"),
        ({"disable_additional_properties": True, "json": {}}, "'disable_additional_properties' is not supported"),
    ],
)
def test_a_wrong_form_is_refused_with_its_reason(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(structured_outputs=values)  # type: ignore[arg-type]
    assert any(sentence in problem for problem in refused.value.problems), refused.value.problems
    assert all(problem.startswith("structured_outputs: ") for problem in refused.value.problems)
    assert len(str(refused.value)) < 1000


def test_its_problems_are_named_beside_those_of_the_other_parameters() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(structured_outputs={"regex": ""}, top_p=2.0)  # type: ignore[arg-type]
    assert len(refused.value.problems) == 2
    with pytest.raises(InvalidRequestError, match="structured_outputs is a list, expected a map"):
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
