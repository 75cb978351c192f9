"""Grammars for `tool_choice`: `required` and a named function permit calls only; `auto` constrains strict functions.

The text is Lark for `structured_outputs={"grammar": ...}`. This module writes it, the engine compiles it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace_gateway.errors import ForcedChoiceError
from headrace_gateway.parsers.reasoning import THINK
from headrace_gateway.requests.call import Function
from headrace_wire.structured_outputs import MAX_GRAMMAR_BYTES

MAX_PARALLEL_CALLS: Final = 16
_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
# The separators of Python's json, which chat templates use to show calls to the model. Small models repeat white space
# endlessly if a grammar permits any.
_SPACING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class ForcedChoice:
    """A grammar, and the tool parser for the text that it permits."""

    grammar: str
    syntax: str


@dataclass(frozen=True, slots=True)
class _Syntax:
    """How a model family writes a call, as text only: a grammar cannot match special tokens."""

    before: str
    """Text that starts the calls and distinguishes them from other text."""
    between: str
    after: str
    call: tuple[str, str, str]
    """Text before the name, between the name and the arguments, and after the arguments."""


_SYNTAXES: Final = {
    "hermes": _Syntax("<tool_call>", "\n<tool_call>", "", ('\n{"name": ', ', "arguments": ', "}\n</tool_call>")),
    "llama3_json": _Syntax("", "; ", "", ('{"name": ', ', "parameters": ', "}")),
    "phi4_mini_json": _Syntax("functools[", ", ", "]", ('{"name": ', ', "arguments": ', "}")),
}
_GENERIC: Final = "hermes"
_GAP: Final = "gap: /[ \\n]{0,2}/"


def forced_choice(
    tools: Sequence[Function],
    *,
    tool_parser: str | None,
    reasoning_parser: str | None = None,
    prompt_tail: str | None = None,
    parallel: bool = True,
) -> ForcedChoice:
    """Write a grammar that permits only calls of these functions.

    Args:
        tools: the functions that may be called; exactly one for a named choice.
        tool_parser: the model's tool parser. If a grammar cannot write its syntax as text, that of Hermes is used.
        reasoning_parser: the model's reasoning parser. With `think`, reasoning may come before the calls.
        prompt_tail: the end of the prompt, if known. It shows whether reasoning has begun or ended.
        parallel: False: exactly one call; True: up to MAX_PARALLEL_CALLS.

    Raises:
        ForcedChoiceError: there is no function, or the grammar exceeds the queue's limit.
    """
    if not tools:
        raise ForcedChoiceError("tools must contain at least one function that may be called, got none")
    name = tool_parser if tool_parser in _SYNTAXES else _GENERIC
    syntax = _SYNTAXES[name]
    opening, rules = _opening(syntax, reasoning_parser, prompt_tail)
    further = f"({_text(syntax.between)}call){{0,{MAX_PARALLEL_CALLS - 1}}} " if parallel else ""
    rules.insert(0, f"start: {opening}call {further}{_text(syntax.after)}")
    rules += _call_rules(tools, syntax.call, [_schema(tool) for tool in tools])
    return ForcedChoice(_checked(rules), name)


def strict_calls(tools: Sequence[Function], *, tool_parser: str | None, parallel: bool = True) -> str | None:
    """Write the grammar for strict functions with `tool_choice` auto: any text, and calls that follow the schemas.

    Returns None if no function is strict, or if no text distinguishes a call from other text.

    Raises:
        ForcedChoiceError: the grammar exceeds the queue's limit.
    """
    if tool_parser != "hermes" or not any(tool.strict for tool in tools):
        return None
    syntax = _SYNTAXES["hermes"]
    schemas = [_schema(tool) if tool.strict else {"type": "object"} for tool in tools]
    rules = [
        f"start: (trigger call){'*' if parallel else '?'} TAIL",
        f"trigger[lazy]: /(?s:.*){syntax.before}/",
        f"TAIL: /(?s:.*)/ & ~/(?s:.*){syntax.before}(?s:.*)/",
        *_call_rules(tools, syntax.call, schemas),
    ]
    return _checked(rules)


def _call_rules(
    tools: Sequence[Function], call: tuple[str, str, str], schemas: Sequence[Mapping[str, Any]]
) -> list[str]:
    before, between, after = call
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    for index, (tool, schema) in enumerate(zip(tools, schemas, strict=True)):
        head = before + json.dumps(tool.name, ensure_ascii=False) + between
        rules.append(f"call_{index}: {_text(head)}arguments_{index} {_text(after)}")
        rules.append(f"arguments_{index}: %json {_written(schema, tool.name)}")
    return rules


def _written(schema: Mapping[str, Any], name: str) -> str:
    try:
        return json.dumps(_without_prose(schema), ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise ForcedChoiceError(f"the parameters of function {name!r} are nested too deeply for a grammar") from None


def _without_prose(schema: Any) -> Any:
    """Drop the keywords that describe a schema but constrain nothing: they would use up the grammar's size limit."""
    if isinstance(schema, Mapping):
        return {
            key: value if key in ("enum", "const") else _without_prose(value)
            for key, value in schema.items()
            if not (key in ("title", "description", "$comment") and isinstance(value, str))
        }
    return [_without_prose(value) for value in schema] if isinstance(schema, list) else schema


def _checked(rules: Sequence[str]) -> str:
    grammar = "\n".join(rules) + "\n"
    size = len(grammar.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise ForcedChoiceError(
            f"the grammar of the functions that may be called must be at most {MAX_GRAMMAR_BYTES} bytes, got {size}: "
            "allow fewer of them, or shorten their parameters"
        )
    return grammar


def _text(text: str) -> str:
    return f"{json.dumps(text, ensure_ascii=False)} " if text else ""


def _opening(syntax: _Syntax, parser: str | None, prompt_tail: str | None) -> tuple[str, list[str]]:
    """Return the text before the first call, and the rules for it.

    A rule that matches any text must not match the start of a call, or it would match the whole call.
    """
    before = _text(syntax.before)
    if parser != "think" or (prompt_tail or "").rstrip().endswith("</think>"):
        return before, []
    if prompt_tail is not None and THINK.opened_by(prompt_tail):
        return f"reasoning gap {before}", ["reasoning[lazy]: /(?s:.*)<\\/think>/", _GAP]
    tagged = "reasoning[lazy]: /<think>(?s:.*)<\\/think>/"
    if prompt_tail is not None:
        return f"(reasoning gap)? {before}", [tagged, _GAP]
    if not syntax.before:
        return "(reasoning gap)? ", [tagged.replace("<think>", "(<think>|[^<{])", 1), _GAP]
    # This text may be reasoning that the prompt has opened, or content.
    first = "".join(sorted({"<", syntax.before[0]}))
    preface = f"preface[lazy]: /[^{first}](?s:.*){re.escape(syntax.before)}/"
    return f"((reasoning gap)? {before}| preface) ", [tagged, _GAP, preface]


def _schema(tool: Function) -> dict[str, Any]:
    """Return the schema of the arguments. In a strict function an unsupported keyword is an error."""
    schema = _NO_PARAMETERS if tool.parameters is None else {"type": "object", **tool.parameters}
    return {**schema, "x-guidance": {**_SPACING, "lenient": not tool.strict}}
