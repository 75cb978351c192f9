"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, since version 11 `[TOOL_CALLS]name[ARGS]{...}`."""

import re

from headrace_gateway.parsers.events import EventWriter
from headrace_gateway.parsers.json_call import Found, PendingText, read_arguments, read_calls, read_tagged
from headrace_gateway.parsers.json_reader import read_value
from headrace_gateway.parsers.text_reader import Steps, TagSet, TextReader

_OPEN = "[TOOL_CALLS]"
_TAGS = TagSet(_OPEN, "</s>", "[INST]", "[/INST]")
_CALL_ID = TagSet("[CALL_ID]")
_ARGS = TagSet("[ARGS]")
_NAME = re.compile(r"[^\s\[\]{}<>\"]+")


def read(reader: TextReader, writer: EventWriter) -> Steps[None]:
    """Read calls and the text around them to the end."""
    return read_tagged(reader, writer, _TAGS, (_OPEN,), _read_call)


def _read_call(reader: TextReader, writer: EventWriter, _tag: str, pending: PendingText) -> Steps[Found]:
    if (yield from reader.space(pending)) in ("[", "{"):
        return (yield from read_calls(reader, writer, pending))
    return (yield from _read_named(reader, writer, pending))


def _read_named(reader: TextReader, writer: EventWriter, pending: PendingText) -> Steps[Found]:
    pieces: list[str] = []
    yield from reader.all_of(_NAME, pending.tee(pieces))
    char = yield from reader.space(pending)
    if (yield from reader.next_is(_CALL_ID, pending)):
        yield from reader.all_of(_NAME, pending)
        yield from reader.space(pending)
    has_tag = yield from reader.next_is(_ARGS, pending)
    char = yield from reader.space(pending)
    if char != "{" and (char or not has_tag):
        return Found.OTHER if char else Found.CUT
    name = "".join(pieces)
    if name not in writer.tools:
        pending.send_to(writer.content)
        yield from read_value(reader, pending)
        return Found.OTHER
    writer.begin_call(name)
    yield from read_arguments(reader, writer)
    return Found.CALL
