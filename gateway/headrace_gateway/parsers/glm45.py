"""GLM 4.5 to 5: `<tool_call>NAME<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>`, with line breaks in 4.5."""

import re

from headrace_gateway.parsers.events import EventWriter
from headrace_gateway.parsers.json_call import Found, PendingText, read_tagged
from headrace_gateway.parsers.schema_values import ObjectWriter
from headrace_gateway.parsers.text_reader import Steps, TagSet, TextReader

_OPEN = "<tool_call>"
_TAGS = TagSet(
    _OPEN, "<|user|>", "<|observation|>", "<|assistant|>", "<|system|>", "<|endoftext|>", "[gMASK]", "<sop>"
)  # fmt: skip
_NAME = re.compile(r"[^\s<>{}\[\]\"]+")
_KEY_END = TagSet("</arg_key>", "</tool_call>")
_VALUE = TagSet("<arg_value>")
_VALUE_END = TagSet("</arg_value>")
_AFTER = TagSet("<arg_key>", "</tool_call>")


def read(reader: TextReader, writer: EventWriter) -> Steps[None]:
    """Read calls and the text around them to the end."""
    return read_tagged(reader, writer, _TAGS, (_OPEN,), _read_call)


def _read_call(reader: TextReader, writer: EventWriter, _tag: str, pending: PendingText) -> Steps[Found]:
    pieces: list[str] = []
    yield from reader.space(pending)
    yield from reader.all_of(_NAME, pending.tee(pieces))
    yield from reader.space(pending)
    follows = yield from reader.next_is(_AFTER, pending)
    if not follows and not (yield from reader.peek()):
        return Found.CUT
    name = "".join(pieces)
    if not follows or name not in writer.tools:
        return Found.OTHER
    writer.begin_call(name)
    arguments = ObjectWriter(writer, writer.tools[name])
    while follows == "<arg_key>":
        follows = yield from _read_argument(reader, arguments)
    if follows or (yield from reader.peek()):
        arguments.end()
    return Found.CALL


def _read_argument(reader: TextReader, arguments: ObjectWriter) -> Steps[str | None]:
    """Read a name after its opening tag, and its value. Return the tag after them; None if there is none."""
    key: list[str] = []
    value: list[str] = []
    if (end := (yield from reader.until(_KEY_END, key.append))) != "</arg_key>":
        return end
    yield from reader.space()
    if not (yield from reader.next_is(_VALUE)):
        return None
    end = yield from reader.until(_VALUE_END, value.append)
    text = "".join(value)
    if end is None:  # the model left out the value's closing tag, or the text is cut off
        text = text.rstrip()
        if not text.endswith("</tool_call>"):
            return None
        end, text = "</tool_call>", text.removesuffix("</tool_call>")
    arguments.add_text("".join(key).strip(), text)
    if end == "</tool_call>":
        return end
    yield from reader.space()
    return (yield from reader.next_is(_AFTER))
