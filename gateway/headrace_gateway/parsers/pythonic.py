"""Llama 4 and Olmo 3: calls in Python syntax, `[f(a=1), g(b="x")]`. Olmo puts them between tags."""

import re
from typing import Final

from headrace_gateway.parsers.events import EventWriter
from headrace_gateway.parsers.json_call import Found, PendingText
from headrace_gateway.parsers.python_literal import json_of_python
from headrace_gateway.parsers.schema_values import ObjectWriter, quoted
from headrace_gateway.parsers.text_reader import Steps, TagSet, TextReader, drop

_START: Final = frozenset({"<|python_start|>", "<|python_tag|>", "<function_calls>"})
_TAGS = TagSet(
    *_START, "<|python_end|>", "</function_calls>", "<|eot|>", "<|eom|>", "<|eot_id|>", "<|im_end|>", "<|endoftext|>"
)
_LIST = TagSet("[")
_ARGUMENTS = TagSet("(")
_IS = TagSet("=")
_END = TagSet(")")
_NAME = re.compile(r"[\w.\-]+")
_SEPARATORS = re.compile(r"[\s,;]+")
_CLOSING = re.compile(r"[\s\]]+")


def read(reader: TextReader, writer: EventWriter) -> Steps[None]:
    """Read calls at the start and after each tag. A list elsewhere is content."""
    tag: str | None = "<|python_start|>"
    while tag is not None:
        if tag in _START:
            pending = PendingText()
            yield from reader.space(pending)
            if (yield from reader.next_is(_LIST, pending)) or tag == "<function_calls>":
                found = yield from _read_calls(reader, writer, pending)
            else:
                found = Found.OTHER
            if found is not Found.CALL:
                pending.send_to(writer.content)
        tag = yield from reader.until(_TAGS, writer.content)


def _read_calls(reader: TextReader, writer: EventWriter, pending: PendingText) -> Steps[Found]:
    found = yield from _read_call(reader, writer, pending)
    while found is Found.CALL:
        yield from reader.all_of(_SEPARATORS, drop)
        further = PendingText()
        if (yield from _read_call(reader, writer, further)) is Found.CALL:
            continue
        if further.holds_text:
            further.send_to(writer.content)
        else:
            yield from reader.all_of(_CLOSING, drop)
        break
    return found


def _read_call(reader: TextReader, writer: EventWriter, pending: PendingText) -> Steps[Found]:
    pieces: list[str] = []
    yield from reader.space(pending)
    yield from reader.all_of(_NAME, pending.tee(pieces))
    name = "".join(pieces)
    if not (yield from reader.next_is(_ARGUMENTS, pending)) or name not in writer.tools:
        return Found.OTHER
    writer.begin_call(name)
    arguments = ObjectWriter(writer, writer.tools[name])
    while (yield from _read_argument(reader, arguments)):
        yield from reader.all_of(_SEPARATORS, drop)
    if (yield from reader.peek()):
        yield from reader.next_is(_END)
        arguments.end()
    return Found.CALL


def _read_argument(reader: TextReader, arguments: ObjectWriter) -> Steps[bool]:
    """Read `name=value`. Return False if no argument follows, or if it is cut off."""
    key: list[str] = []
    yield from reader.space()
    yield from reader.all_of(_NAME, key.append)
    yield from reader.space()
    if not key or not (yield from reader.next_is(_IS)):
        return False
    value: list[str] = []
    if not (yield from reader.scan(_Value(), value.append)):
        return False
    written = "".join(value)
    arguments.add("".join(key), json_of_python(written) or quoted(written.strip()))
    return True


class _Value:
    """Finds the end of an argument: a comma or a bracket outside its own brackets and strings."""

    __slots__ = ("_depth", "_escaped", "_quote")
    _OUTSIDE: Final = re.compile(r"['\"\[\](){},]")
    _INSIDE: Final = {"'": re.compile(r"['\\]"), '"': re.compile(r'["\\]')}

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def __call__(self, text: str, start: int) -> tuple[int, bool]:
        position = start
        while position < len(text):
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            match = (self._INSIDE[self._quote] if self._quote else self._OUTSIDE).search(text, position)
            if match is None:
                break
            position = match.end()
            char = match[0]
            if char == "\\":
                self._escaped = True
            elif char in "'\"":
                self._quote = "" if self._quote else char
            elif char in "[({":
                self._depth += 1
            elif self._depth == 0:
                return position - 1, True
            elif char != ",":
                self._depth -= 1
        return len(text), False
