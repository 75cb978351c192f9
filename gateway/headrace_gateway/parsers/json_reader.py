"""JSON that arrives in pieces. Values are passed on as they arrive. Only their ends are found; nothing is validated."""

import json
import re

from headrace_gateway.parsers.text_reader import Sink, Steps, TextReader
from headrace_wire.values import is_unicode

_OUTSIDE = re.compile(r'["{}\[\]<]')
_INSIDE = re.compile(r'["\\]')
_SCALAR = re.compile(r'[^\s,:;{}\[\]"<]+')


class _Scanner:
    """Finds the end of an object, an array or a string.

    Outside a string, `<` is not JSON. It starts the tag that ends the call, so it also ends a value with missing
    brackets.
    """

    __slots__ = ("_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def __call__(self, text: str, start: int) -> tuple[int, bool]:
        position = start
        while position < len(text):
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            match = (_INSIDE if self._in_string else _OUTSIDE).search(text, position)
            if match is None:
                break
            position = match.end()
            match match[0]:
                case "\\":
                    self._escaped = True
                case '"':
                    self._in_string = not self._in_string
                case "<":
                    return position - 1, True
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
            if self._depth <= 0 and not self._in_string:
                return position, True
        return len(text), False


def read_value(reader: TextReader, sink: Sink) -> Steps[bool]:
    """Pass one value on. Return False if the text ends inside the value, or if there is no value."""
    char = yield from reader.peek()
    if char and char in '"{[':
        return (yield from reader.scan(_Scanner(), sink))
    if not char or char in ",:;}]<":
        return False
    yield from reader.all_of(_SCALAR, sink)
    return (yield from reader.peek()) != ""


def read_string(reader: TextReader, sink: Sink) -> Steps[str | None]:
    """Pass one string on. Return its decoded value; None if there is no complete string."""
    pieces: list[str] = []

    def both(text: str) -> None:
        sink(text)
        pieces.append(text)

    if (yield from reader.peek()) != '"' or not (yield from read_value(reader, both)):
        return None
    return decoded_string("".join(pieces))


def decoded_string(written: str) -> str | None:
    """Decode a JSON string. Control characters are allowed.

    Returns None if it is malformed, or if its escapes give a lone surrogate, which no answer can contain.
    """
    try:
        value = json.loads(written, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) and is_unicode(value) else None
