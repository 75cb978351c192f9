"""Grammars for `tool_choice` of required or a named function: the output is then nothing but calls of given functions.

The text is Lark for `structured_outputs={"grammar": ...}`. This module knows the syntax, the engine compiles it.
"""

import json
from collections.abc import Sequence
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
    between: str
    after: str
    call: tuple[str, str, str]
    """What stands before the name, between it and the arguments, and behind them."""


_SYNTAXES: Final = {
    "hermes": _Syntax("", "\n", "", ('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>")),
    "llama3_json": _Syntax("", "; ", "", ('{"name": ', ', "parameters": ', "}")),
    "phi4_mini_json": _Syntax("functools[", ", ", "]", ('{"name": ', ', "arguments": ', "}")),
}
_GENERIC: Final = "hermes"


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
    calls = _text(syntax.before) + _calls(syntax, parallel=parallel) + _text(syntax.after)
    reasoning, opening = _reasoning(reasoning_parser, prompt_tail)
    rules = [
        f"start: {reasoning}{calls}",
        "call: " + " | ".join(f"call_{index}" for index in range(len(tools))),
    ]
    for index, tool in enumerate(tools):
        before, between, after = syntax.call
        head = before + json.dumps(tool.name, ensure_ascii=False) + between
        rules.append(f"call_{index}: {_text(head)}arguments_{index} {_text(after)}")
        rules.append(f"arguments_{index}: %json {json.dumps(_schema(tool), ensure_ascii=False)}")
    if reasoning:
        rules += [f"reasoning[lazy]: /{opening}(?s:.*)<\\/think>/", "gap: /[ \\n]{0,2}/"]
    grammar = "\n".join(rules) + "\n"
    size = len(grammar.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise ForcedChoiceError(
            f"the functions that may be called take {size} bytes as a grammar, which may have at most "
            f"{MAX_GRAMMAR_BYTES}; allow fewer of them, or shorten their parameters"
        )
    return ForcedChoice(grammar, name)


def _text(text: str) -> str:
    return f"{json.dumps(text, ensure_ascii=False)} " if text else ""


def _calls(syntax: _Syntax, *, parallel: bool) -> str:
    if not parallel:
        return "call "
    return f"call ({_text(syntax.between)}call){{0,{MAX_PARALLEL_CALLS - 1}}} "


def _reasoning(parser: str | None, prompt_tail: str | None) -> tuple[str, str]:
    """Return what may stand before the calls, and the start of its expression: `.*` alone would take the calls, too."""
    if parser != "think" or (prompt_tail or "").rstrip().endswith("</think>"):
        return "", ""
    if prompt_tail is None:
        return "(reasoning gap)? ", "(<think>|[^<])"
    return ("reasoning gap ", "") if THINK.opened_by(prompt_tail) else ("(reasoning gap)? ", "<think>")


def _schema(tool: ToolForm) -> dict[str, Any]:
    """Return what the arguments must satisfy. Of a strict function, keywords that the engine lacks are an error."""
    schema = _NO_PARAMETERS if tool.parameters is None else {"type": "object", **tool.parameters}
    return {**schema, "x-guidance": {**_SPACING, "lenient": not tool.strict}}
