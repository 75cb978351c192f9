"""Qwen3-Coder and Qwen 3.5: `<tool_call><function=NAME><parameter=K>text</parameter></function></tool_call>`.

Seed-OSS writes `<seed:tool_call>` instead.
Some models leave out `<tool_call>` or the end of a parameter, or call before they close the reasoning.
"""

import re

from headrace_gateway.parsers.events import EventWriter
from headrace_gateway.parsers.json_call import Found, PendingText, no_call, read_tagged
from headrace_gateway.parsers.schema_values import ObjectWriter
from headrace_gateway.parsers.text_reader import Steps, TagSet, TextReader

_FUNCTION = "<function="
STARTS = ("<tool_call>", "<seed:tool_call>", _FUNCTION)
_TAGS = TagSet(*STARTS, "<|im_end|>", "<|im_start|>", "<|endoftext|>")
_ONLY_FUNCTION = TagSet(_FUNCTION)
_ANGLE = TagSet(">")
_NAME = re.compile(r"[^\s<>{}=]+")
_MEMBER = TagSet("<parameter=", "</parameter>", "</function>", "</tool_call>", "</seed:tool_call>")
_END = ("\n</function>", "</parameter></function>", "</function>", "</tool_call>", "</seed:tool_call>")
_CLOSE = TagSet("</function>", "</tool_call>", "</seed:tool_call>")
# A value that starts on a line of its own also ends on one. The same tags inside a line are text.
_LINE_END = TagSet(
    "\n</parameter>", "\n<parameter=", "\n</function>", "</parameter></function>", "</parameter><parameter="
)
_INLINE_END = TagSet("</parameter>", "<parameter=", "</function>")


def read(reader: TextReader, writer: EventWriter) -> Steps[None]:
    """Read calls and the text around them to the end."""
    return read_tagged(reader, writer, _TAGS, STARTS, read_call)


def read_call(reader: TextReader, writer: EventWriter, tag: str, pending: PendingText) -> Steps[Found]:
    """Read a call after one of STARTS."""
    if tag != _FUNCTION:
        yield from reader.space(pending)
        if not (yield from reader.next_is(_ONLY_FUNCTION, pending)):
            return (yield from no_call(reader))
    pieces: list[str] = []
    yield from reader.all_of(_NAME, pending.tee(pieces))
    if not (yield from reader.next_is(_ANGLE, pending)):
        return (yield from no_call(reader))
    name = "".join(pieces)
    if name not in writer.tools:
        return Found.OTHER
    writer.begin_call(name)
    arguments = ObjectWriter(writer, writer.tools[name])
    if (yield from _read_parameters(reader, arguments)):
        arguments.end()
    yield from reader.space()
    while (yield from reader.next_is(_CLOSE)):
        yield from reader.space()
    return Found.CALL


def _read_parameters(reader: TextReader, arguments: ObjectWriter) -> Steps[bool]:
    """Read all parameters of a function. Return False if the text ends first."""
    tag = yield from _next_member(reader)
    while tag is not None and tag.endswith("<parameter="):
        key: list[str] = []
        value: list[str] = []
        yield from reader.all_of(_NAME, key.append)
        if not (yield from reader.next_is(_ANGLE)):
            break
        ends = _LINE_END if (yield from reader.peek()) == "\n" else _INLINE_END
        tag = yield from reader.until(ends, value.append)
        if tag is None:
            return False
        arguments.add_text("".join(key), "".join(value).removeprefix("\n"))
        if tag.endswith("</parameter>"):
            tag = yield from _next_member(reader)
    return tag in _END or (yield from reader.peek()) != ""


def _next_member(reader: TextReader) -> Steps[str | None]:
    """Read the next tag, skipping stray ends of parameters."""
    tag: str | None = "</parameter>"
    while tag == "</parameter>":
        yield from reader.space()
        tag = yield from reader.next_is(_MEMBER)
    return tag
