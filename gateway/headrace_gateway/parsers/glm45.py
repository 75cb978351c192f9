"""GLM 4.5 to 5: `<tool_call>NAME<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>`, with line ends in 4.5."""

import re

from headrace_gateway.parsers.event_writer import EventWriter
from headrace_gateway.parsers.json_call import Found, Kept
from headrace_gateway.parsers.schema_values import ObjectWriter
from headrace_gateway.parsers.text_reader import Sink, Steps, TagSet, TextReader

_OPEN = "<tool_call>"
_TAGS = TagSet(
    _OPEN, "<|user|>", "<|observation|>", "<|assistant|>", "<|system|>", "<|endoftext|>", "[gMASK]", "<sop>"
)  # fmt: skip
_NAME = re.compile(r"[^\s<>{}\[\]\"]+")
_KEY = TagSet("<arg_key>")
_KEY_END = TagSet("</arg_key>", "</tool_call>")
_VALUE = TagSet("<arg_value>")
_VALUE_END = TagSet("</arg_value>")
_AFTER_NAME = TagSet("<arg_key>", "</tool_call>")
_CLOSE = TagSet("</tool_call>")


def read(reader: TextReader, writer: EventWriter, text: Sink) -> Steps[None]:
    """Read calls among text to the end."""
    while (tag := (yield from reader.until(_TAGS, text))) is not None:
        if tag != _OPEN:
            continue
        kept = Kept(tag)
        found = yield from _read_call(reader, writer, kept)
        if found is Found.OTHER:
            kept.goes_to(text)
        elif found is Found.CUT:
            writer.trim()


def _read_call(reader: TextReader, writer: EventWriter, kept: Kept) -> Steps[Found]:
    pieces: list[str] = []
    yield from reader.space(kept)
    yield from reader.all_of(_NAME, kept.also(pieces))
    yield from reader.space(kept)
    follows = yield from reader.next_is(_AFTER_NAME, kept)
    if not follows and not (yield from reader.peek()):
        return Found.CUT
    name = "".join(pieces)
    if not follows or name not in writer.tools:
        return Found.OTHER
    writer.begin_call(name)
    arguments = ObjectWriter(writer, writer.tools[name])
    is_key = follows != "</tool_call>"
    while is_key and (yield from _read_argument(reader, arguments)):
        yield from reader.space()
        is_key = (yield from reader.next_is(_KEY)) is not None
    yield from reader.space()
    if follows == "</tool_call>" or (yield from reader.next_is(_CLOSE)) or (yield from reader.peek()):
        arguments.end()
    return Found.CALL


def _read_argument(reader: TextReader, arguments: ObjectWriter) -> Steps[bool]:
    """Read a name behind its opening tag, and its value. False: they are cut, or malformed."""
    key: list[str] = []
    value: list[str] = []
    if (yield from reader.until(_KEY_END, key.append)) != "</arg_key>":
        return False
    yield from reader.space()
    if not (yield from reader.next_is(_VALUE)) or not (yield from reader.until(_VALUE_END, value.append)):
        return False
    arguments.add_text("".join(key).strip(), "".join(value))
    return True
