"""Shared by the tests of all parsers: parses a text whole and character by character, which must agree."""

from collections.abc import Sequence
from typing import NamedTuple

from headrace_gateway.parsers.events import CallArguments, CallBegins, Content, ParserEvent, Reasoning
from headrace_gateway.parsers.registry import make_parser
from headrace_gateway.requests.call import Function

TOOLS = (
    Function(
        name="f", parameters={"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}
    ),
    Function(name="g"),
)


class Parsed(NamedTuple):
    """The events of a text, joined."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]


def events_of(
    tool_parser: str | None,
    pieces: Sequence[str],
    reasoning_parser: str | None = None,
    prompt_tail: str | None = None,
    *,
    tools: Sequence[Function] = TOOLS,
    parallel: bool = True,
) -> list[ParserEvent]:
    parser = make_parser(tool_parser, reasoning_parser, tools=tools, prompt_tail=prompt_tail, parallel=parallel)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*events, *parser.finish()])


def joined(events: Sequence[ParserEvent]) -> list[ParserEvent]:
    """Merge adjacent events of one kind."""
    result: list[ParserEvent] = []
    for event in events:
        match (result[-1] if result else None), event:
            case Content(before), Content(text):
                result[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                result[-1] = Reasoning(before + text)
            case CallArguments(index, before), CallArguments(same, json) if index == same:
                result[-1] = CallArguments(index, before + json)
            case _:
                result.append(event)
    return result


def parse(
    tool_parser: str | None,
    text: str,
    reasoning_parser: str | None = None,
    prompt_tail: str | None = None,
    *,
    tools: Sequence[Function] = TOOLS,
    parallel: bool = True,
) -> Parsed:
    arguments = (reasoning_parser, prompt_tail)
    whole = events_of(tool_parser, [text], *arguments, tools=tools, parallel=parallel)
    assert events_of(tool_parser, list(text), *arguments, tools=tools, parallel=parallel) == whole
    return folded(whole)


def folded(events: Sequence[ParserEvent]) -> Parsed:
    content, reasoning = "", ""
    calls: list[tuple[str, str]] = []
    for event in events:
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallBegins(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, json):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + json)
    return Parsed(content, reasoning, calls)
