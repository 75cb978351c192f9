"""The forms that a request may ask for, in llguidance's own notation."""

import json

from llguidance import LLMatcher

from headrace_engine.gbnf import is_gbnf, lark_of
from headrace_engine.grammar_errors import GrammarError, sentence
from headrace_engine.structured_outputs_params import StructuredOutputsParams


def grammar_source(params: StructuredOutputsParams) -> str:
    """The text from which the library compiles the grammar. Raises GrammarError where there is none."""
    try:
        if params.regex is not None:
            return LLMatcher.grammar_from_regex(params.regex)
        if params.choice is not None:
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
            return LLMatcher.grammar_from_lark(f"start: {texts}")
        if params.grammar is not None:
            return LLMatcher.grammar_from_lark(_lark(params.grammar))
        return LLMatcher.grammar_from_json_schema(
            '{"type": "object"}' if params.json is None else params.json,
            overrides={
                "lenient": False,
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
    return grammar
