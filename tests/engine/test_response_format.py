"""What the gateway makes of `response_format`, compiled and walked as the engine does it."""

import json
from typing import Any

import pytest

from engine.tokenizer_kinds import byte_level
from headrace_engine.grammar.grammar import Grammar, GrammarCompiler, TokenizerDefinition
from headrace_engine.requests.structured_outputs_params import StructuredOutputsParams
from headrace_gateway.chat.fields import read_chat
from unit.gateway.bodies import CHAT, model

DOCUMENT: dict[str, Any] = {"a": [1, {"b": True}], "c": {"d": "e"}}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "minItems": 2, "maxItems": 2}, "c": {"type": "object"}},
    "required": ["a", "c"],
    "additionalProperties": False,
}
FORMATS = (
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
)
TOKENIZER = byte_level()
SPACES = [each for each in TOKENIZER.get_vocab().values() if TOKENIZER.decode([each]) in (" ", "\n", "\t", "\r")]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    end = TOKENIZER.token_to_id("</s>")
    size = TOKENIZER.get_vocab_size()
    return GrammarCompiler(
        TokenizerDefinition(tokenizer_json=TOKENIZER.to_str().encode(), vocab_size=size, eos_token_ids=[end])
    )


def grammar_of(compiler: GrammarCompiler, response_format: dict[str, Any]) -> Grammar:
    call = read_chat({**CHAT, "response_format": response_format}, model=model(), lora=None)
    params = call.requests[0].sampling_params
    return compiler.compile(StructuredOutputsParams(**params["structured_outputs"]))


def allows(grammar: Grammar, token_id: int) -> bool:
    return bool(grammar.bitmasks()[0][token_id >> 3] >> (token_id & 7) & 1)


@pytest.mark.parametrize("response_format", FORMATS)
def test_json_may_be_written_as_models_write_it(compiler: GrammarCompiler, response_format: dict[str, Any]) -> None:
    compact, plain = json.dumps(DOCUMENT, separators=(",", ":")), json.dumps(DOCUMENT)
    indented = [json.dumps(DOCUMENT, indent=indent) for indent in (2, 4, "\t")]
    for text in (compact, plain, *indented):
        grammar = grammar_of(compiler, response_format)
        for token_id in TOKENIZER.encode(text, add_special_tokens=False).ids:
            assert allows(grammar, token_id), text
            grammar.accept([token_id])


@pytest.mark.parametrize("response_format", FORMATS)
@pytest.mark.parametrize("begun", ["{", '{"a"', '{"a":', '{"a": [1', '{"a": [1,', '{"a": [1, 2], "c": {"x": {}'])
def test_a_model_that_likes_white_space_cannot_repeat_it_without_end(
    compiler: GrammarCompiler, response_format: dict[str, Any], begun: str
) -> None:
    for space in SPACES:
        grammar = grammar_of(compiler, response_format)
        grammar.accept(TOKENIZER.encode(begun, add_special_tokens=False).ids)
        for _ in range(30):
            liked = [each for each in (space, *SPACES) if allows(grammar, each)]
            if not liked:
                break
            grammar.accept(liked[:1])
        else:
            pytest.fail("30 characters of white space")
