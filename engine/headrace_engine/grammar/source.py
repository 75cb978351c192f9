"""Converts the structured outputs of a request to llguidance's notation."""

import json
import re

from llguidance import LLMatcher, regex_to_lark

from headrace_engine.grammar.errors import GrammarError, sentence
from headrace_engine.grammar.gbnf import is_gbnf, lark_of
from headrace_engine.requests.structured_outputs_params import StructuredOutputsParams

# `\d` and `\w` are ASCII only, as in the `pattern` of a JSON schema and in ECMA 262.
_ASCII = "dw"
# The tags that open a thought at the end of a prompt, and the tags that end it.
_THOUGHTS = {"<think>": "</think>", "[THINK]": "[/THINK]", "<seed:think>": "</seed:think>"}
_LARK_PART = re.compile(r"""(?s)(?:"(?:\\.|[^"\\])*"|//[^\n]*|\#[^\n]*)|/(?P<regex>(?:\\.|[^/\\])+)/""")


def grammar_source(params: StructuredOutputsParams) -> str:
    """Return the grammar in llguidance's notation. Raises GrammarError if it cannot be expressed."""
    try:
        if params.regex is not None:
            return _of_lark(f"start: /{regex_to_lark(params.regex, _ASCII)}/")
        if params.choice is not None:
            texts = " | ".join(map(_json, params.choice))
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


def closing_tag(prompt_end: str) -> str | None:
    """Return the tag that closes the thought that the prompt opens at its end, or None if it opens no thought."""
    end = prompt_end.rstrip()
    return next((closing for opening, closing in _THOUGHTS.items() if end.endswith(opening)), None)


def after_thought(source: str, closing: str, token_id: int | None) -> str:
    """Return a grammar for any text up to a closing tag, followed by a text that `source` allows, as in vLLM.

    Args:
        token_id: the special token that is the closing tag. Regular expressions do not match special tokens. None if
            the tag is plain text.
    """
    (body,) = json.loads(source)["grammars"]
    is_schema = "json_schema" in body
    form = f"%json {_json(body['json_schema'])}" if is_schema else f"%lark {{\n{body['lark_grammar']}\n}}"
    thought = f"/(?s:.*)/ <[{token_id}]>" if token_id is not None else "text"
    rules = [f"start: {thought} gap form", "gap: /[ \\n]{0,2}/", f"form: {form}"]
    if token_id is None:
        rules.append(f"text[lazy]: /(?s:.*){re.escape(closing).replace('/', chr(92) + '/')}/")
    return _of_lark("\n".join(rules))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _lark(grammar: str) -> str:
    if is_gbnf(grammar):
        return lark_of(grammar)
    if ":" not in grammar:
        raise GrammarError("grammar has no rule: it must be Lark with a rule start, or GBNF with a rule root")
    return _LARK_PART.sub(
        lambda part: f"/{regex_to_lark(part['regex'], _ASCII)}/" if part["regex"] else part[0], grammar
    )


def _of_lark(text: str) -> str:
    return _json({"grammars": [{"lark_grammar": text}]})
