"""Grammars for `tool_choice`: required and a named function leave nothing but calls, auto binds strict functions.

The text is Lark for `structured_outputs={"grammar": ...}`. This module knows the syntax, the engine compiles it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace_broker.structured_rules import MAX_GRAMMAR_BYTES
from headrace_gateway.call import ToolForm
from headrace_gateway.errors import ForcedChoiceError
from headrace_gateway.parsers.reasoning import THINK

MAX_PARALLEL_CALLS: Final = 16
_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
# As Python's json writes it, which is how chat templates show calls to the models. White space that a grammar leaves
# free is what small models repeat without end.
_SPACING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class ForcedChoice:
    """A grammar, and the tool parser that reads back what it lets through."""

    grammar: str
    syntax: str


@dataclass(frozen=True, slots=True)
class _Syntax:
    """How a family writes a call. Only texts: a special token is no text to a grammar."""

    before: str
    """What begins the calls, and tells them from other text."""
    between: str
    after: str
    call: tuple[str, str, str]
    """What stands before the name, between it and the arguments, and behind them."""


_SYNTAXES: Final = {
    "hermes": _Syntax("<tool_call>", "\n<tool_call>", "", ('\n{"name": ', ', "arguments": ', "}\n</tool_call>")),
    "llama3_json": _Syntax("", "; ", "", ('{"name": ', ', "parameters": ', "}")),
    "phi4_mini_json": _Syntax("functools[", ", ", "]", ('{"name": ', ', "arguments": ', "}")),
}
_GENERIC: Final = "hermes"
_GAP: Final = "gap: /[ \\n]{0,2}/"


def forced_choice(
    tools: Sequence[ToolForm],
    *,
    tool_parser: str | None,
    reasoning_parser: str | None = None,
    prompt_tail: str | None = None,
    parallel: bool = True,
) -> ForcedChoice:
    """Write the grammar that lets through calls of these functions only.

    Args:
        tools: those that may be called: one for a named choice.
        tool_parser: of the model. Its own syntax is used where a grammar can tell it as text, else that of Hermes.
        reasoning_parser: of the model. With `think`, reasoning may come before the calls.
        prompt_tail: the prompt's end, if it is known: it tells whether reasoning has begun, or ended.
        parallel: False: exactly one call; True: up to MAX_PARALLEL_CALLS.

    Raises:
        ForcedChoiceError: there is no function, or the grammar is larger than the queue takes.
    """
    if not tools:
        raise ForcedChoiceError("tools must hold at least one function that may be called")
    name = tool_parser if tool_parser in _SYNTAXES else _GENERIC
    syntax = _SYNTAXES[name]
    opening, rules = _opening(syntax, reasoning_parser, prompt_tail)
    further = f"({_text(syntax.between)}call){{0,{MAX_PARALLEL_CALLS - 1}}} " if parallel else ""
    rules.insert(0, f"start: {opening}call {further}{_text(syntax.after)}")
    rules += _call_rules(tools, syntax.call, [_schema(tool) for tool in tools])
    return ForcedChoice(_checked(rules), name)


def strict_calls(tools: Sequence[ToolForm], *, tool_parser: str | None, parallel: bool = True) -> str | None:
    """Write the grammar of `tool_choice` auto for strict functions: any text, but calls as the functions say.

    Returns None where no function is strict, and where no text tells a call from other text.

    Raises:
        ForcedChoiceError: the grammar is larger than the queue takes.
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
    tools: Sequence[ToolForm], call: tuple[str, str, str], schemas: Sequence[Mapping[str, Any]]
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
    """Leave out what describes a schema and forbids nothing: it would take much of the room."""
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
            f"the functions that may be called take {size} bytes as a grammar, which may have at most "
            f"{MAX_GRAMMAR_BYTES}; allow fewer of them, or shorten their parameters"
        )
    return grammar


def _text(text: str) -> str:
    return f"{json.dumps(text, ensure_ascii=False)} " if text else ""


def _opening(syntax: _Syntax, parser: str | None, prompt_tail: str | None) -> tuple[str, list[str]]:
    """Return what stands before the first call, and the rules for it.

    A rule for any text must not begin as the calls do: it would take them as its text.
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
    # This text may be reasoning that the prompt has opened, or an answer.
    first = "".join(sorted({"<", syntax.before[0]}))
    preface = f"preface[lazy]: /[^{first}](?s:.*){re.escape(syntax.before)}/"
    return f"((reasoning gap)? {before}| preface) ", [tagged, _GAP, preface]


def _schema(tool: ToolForm) -> dict[str, Any]:
    """Return what the arguments must satisfy. Of a strict function, keywords that the engine lacks are an error."""
    schema = _NO_PARAMETERS if tool.parameters is None else {"type": "object", **tool.parameters}
    return {**schema, "x-guidance": {**_SPACING, "lenient": not tool.strict}}
