"""Qwen3-Coder and Qwen 3.5: `<tool_call><function=NAME><parameter=K>text</parameter></function></tool_call>`.

The model at times leaves out `<tool_call>`, or the end of a parameter, and calls before it closes its reasoning.
"""

import re

from headrace_gateway.parsers.event_writer import EventWriter
from headrace_gateway.parsers.json_call import Found, Kept
from headrace_gateway.parsers.schema_values import ObjectWriter
from headrace_gateway.parsers.text_reader import Sink, Steps, TagSet, TextReader

_OPEN = "<tool_call>"
_FUNCTION = "<function="
STARTS = (_OPEN, _FUNCTION)
_TAGS = TagSet(*STARTS, "<|im_end|>", "<|im_start|>", "<|endoftext|>")
_ONLY_FUNCTION = TagSet(_FUNCTION)
_ANGLE = TagSet(">")
_NAME = re.compile(r"[^\s<>{}=]+")
_MEMBER = TagSet("<parameter=", "</parameter>", "</function>", "</tool_call>")
_CLOSE = TagSet("</function>", "</tool_call>")
# A value that begins on a line of its own ends so, too: such tags within its lines are text.
_LINE_END = TagSet(
    "\n</parameter>", "\n<parameter=", "\n</function>", "</parameter></function>", "</parameter><parameter="
)
_INLINE_END = TagSet("</parameter>", "<parameter=", "</function>")


def read(reader: TextReader, writer: EventWriter, text: Sink) -> Steps[None]:
    """Read calls among text to the end."""
    while (tag := (yield from reader.until(_TAGS, text))) is not None:
        if tag in STARTS:
            kept = Kept()
            found = yield from read_call(reader, writer, tag, kept)
            if found is Found.OTHER:
                kept.goes_to(text)
            elif found is Found.CUT:
                writer.trim()


def read_call(reader: TextReader, writer: EventWriter, tag: str, kept: Kept) -> Steps[Found]:
    """Read a call behind one of STARTS."""
    kept(tag)
    if tag == _OPEN:
        yield from reader.space(kept)
        if not (yield from reader.next_is(_ONLY_FUNCTION, kept)):
            return Found.OTHER if (yield from reader.peek()) else Found.CUT
    pieces: list[str] = []
    yield from reader.all_of(_NAME, kept.also(pieces))
    if not (yield from reader.next_is(_ANGLE, kept)):
        return Found.OTHER if (yield from reader.peek()) else Found.CUT
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
    """Read all parameters of a function. False: the text ended before they did."""
    tag: str | None = None
    while True:
        if tag is None or not tag.endswith("<parameter="):
            if (yield from reader.space()) == "":
                return False
            tag = yield from reader.next_is(_MEMBER)
            if tag == "</parameter>":
                continue
        if tag is None or not tag.endswith("<parameter="):
            return tag is not None or (yield from reader.peek()) != ""
        key: list[str] = []
        yield from reader.all_of(_NAME, key.append)
        if not (yield from reader.next_is(_ANGLE)):
            return (yield from reader.peek()) != ""
        value: list[str] = []
        ends = _LINE_END if (yield from reader.peek()) == "\n" else _INLINE_END
        tag = yield from reader.until(ends, value.append)
        if tag is None:
            return False
        text = "".join(value).removeprefix("\n")
        arguments.add_text("".join(key), text)
        if tag.endswith("</function>"):
            return True
