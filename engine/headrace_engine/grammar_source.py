"""Converts the structured outputs of a request to llguidance's notation."""

import json
import re

from llguidance import LLMatcher, regex_to_lark

from headrace_engine.gbnf import is_gbnf, lark_of
from headrace_engine.grammar_errors import GrammarError, sentence
from headrace_engine.structured_outputs_params import StructuredOutputsParams

# `\d` and `\w` are ASCII only, as in the `pattern` of a JSON schema and in ECMA 262.
_ASCII = "dw"
_LARK_PART = re.compile(r"""(?s)(?:"(?:\\.|[^"\\])*"|//[^\n]*|\#[^\n]*)|/(?P<regex>(?:\\.|[^/\\])+)/""")


def grammar_source(params: StructuredOutputsParams) -> str:
    """Return the grammar in the notation of the library. Raises GrammarError if it cannot be expressed."""
    try:
        if params.regex is not None:
            return _of_lark(f"start: /{regex_to_lark(params.regex, _ASCII)}/")
        if params.choice is not None:
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
            return _of_lark(f"start: {texts}")
        if params.grammar is not None:
            return _of_lark(_lark(params.grammar))
        return LLMatcher.grammar_from_json_schema(
            '{"type": "object"}' if params.json is None else params.json,
            overrides={
                "lenient": False,
                "coerce_one_of": False,
                "whitespace_flexible": not params.disable_any_whitespace,
                "whitespace_pattern": params.whitespace_pattern,
            },
        )
    except (ValueError, RecursionError) as error:
        raise GrammarError(sentence(str(error))) from error


def _lark(grammar: str) -> str:
    if is_gbnf(grammar):
        return lark_of(grammar)
    if ":" not in grammar:
        raise GrammarError("grammar has no rule: it must be Lark with a rule start, or GBNF with a rule root")
    return _LARK_PART.sub(
        lambda part: f"/{regex_to_lark(part['regex'], _ASCII)}/" if part["regex"] else part[0], grammar
    )


def _of_lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]}, ensure_ascii=False)
