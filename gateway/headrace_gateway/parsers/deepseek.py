# ruff: noqa: RUF001, RUF002 - these models' tokens contain such characters
"""DeepSeek V3 and R1, and V3.1: calls between special tokens.

V3:   `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, a line end, and the arguments as a fenced block of JSON.
V3.1: `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`.
"""

import re

from headrace_gateway.parsers.events import EventWriter
from headrace_gateway.parsers.json_call import Found, PendingText, no_call, read_arguments, read_tagged
from headrace_gateway.parsers.json_reader import read_value
from headrace_gateway.parsers.text_reader import Sink, Steps, TagSet, TextReader, drop

_OPEN = "<｜tool▁call▁begin｜>"
_TAGS = TagSet(
    _OPEN,
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜end▁of▁sentence｜>",
    "<｜Assistant｜>",
)
_SEPARATOR = TagSet("<｜tool▁sep｜>")
_CLOSE = TagSet("<｜tool▁call▁end｜>")
_FENCE = TagSet("```json")
_FENCE_END = TagSet("```")
_NAME = re.compile(r"[^\s<>`{}\[\]\"]+")


def read(reader: TextReader, writer: EventWriter) -> Steps[None]:
    """Read calls and the text around them to the end."""
    return read_tagged(reader, writer, _TAGS, (_OPEN,), _read_call)


def _read_call(reader: TextReader, writer: EventWriter, _tag: str, pending: PendingText) -> Steps[Found]:
    yield from reader.space(pending)
    first: list[str] = []
    second: list[str] = []
    yield from reader.all_of(_NAME, pending.tee(first))
    yield from reader.space(pending)
    if not (yield from reader.next_is(_SEPARATOR, pending)):
        return (yield from no_call(reader))
    yield from reader.space(pending)
    yield from reader.all_of(_NAME, pending.tee(second))
    if (yield from reader.space(pending)) == "`":
        yield from reader.next_is(_FENCE, pending)
        yield from reader.space(pending)
    if (yield from reader.peek()) != "{":
        return (yield from no_call(reader))
    name = "".join(second or first)
    is_call = name in writer.tools
    if is_call:
        writer.begin_call(name)
        yield from read_arguments(reader, writer)
    else:
        pending.send_to(writer.content)
        yield from read_value(reader, pending)
    sink: Sink = drop if is_call else pending
    yield from reader.space(sink)
    yield from reader.next_is(_FENCE_END, sink)
    yield from reader.space(sink)
    yield from reader.next_is(_CLOSE, sink)
    return Found.CALL if is_call else Found.OTHER
