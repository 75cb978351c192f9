"""Finds calls after tags, and reads calls that are JSON objects with `name` and `arguments` (or `parameters`)."""

import re
from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import TypeAlias

from headrace_gateway.parsers.events import EventWriter
from headrace_gateway.parsers.json_reader import decoded_string, read_string, read_value
from headrace_gateway.parsers.text_reader import Sink, Steps, TagSet, TextReader, drop

_OPEN = TagSet("{", "[")
_COLON = TagSet(":")
_CLOSING = re.compile(r"[\s}\]]+")
_SEPARATORS = re.compile(r"[\s,;]+")
# An object with any other key before its name is not a call, so it need not be held back to its end.
_KEYS = frozenset({"name", "arguments", "parameters", "type", "id", "function"})


class Found(Enum):
    """The result of an attempt to read a call."""

    CALL = auto()
    OTHER = auto()
    """Text that is not a call. The text read so far is content."""
    CUT = auto()
    """The text ended before it was clear whether it is a call."""


class PendingText:
    """Text that becomes content if no call follows. After the decision, text is passed on or dropped."""

    __slots__ = ("_pieces", "_sink")

    def __init__(self, *pieces: str) -> None:
        self._pieces: list[str] = list(pieces)
        self._sink: Sink | None = None

    def __call__(self, text: str) -> None:
        if self._sink is None:
            self._pieces.append(text)
        else:
            self._sink(text)

    @property
    def holds_text(self) -> bool:
        return any(self._pieces)

    def tee(self, pieces: list[str]) -> Sink:
        """Return a sink that writes to this buffer and to `pieces`."""

        def both(text: str) -> None:
            self(text)
            pieces.append(text)

        return both

    def send_to(self, sink: Sink) -> None:
        """Send this text, and all that follows, to a sink."""
        sink("".join(self._pieces))
        self._sink = sink
        self._pieces = []


CallReader: TypeAlias = Callable[[TextReader, EventWriter, str, PendingText], Steps[Found]]
"""Reads a call after its opening tag, which the pending text contains."""


def read_tagged(
    reader: TextReader, writer: EventWriter, tags: TagSet, opening: Collection[str], read_call: CallReader
) -> Steps[None]:
    """Read calls, each after one of the tags in `opening`, and the text around them to the end.

    The other tags are dropped.
    """
    while (tag := (yield from reader.until(tags, writer.content))) is not None:
        if tag not in opening:
            continue
        pending = PendingText(tag)
        found = yield from read_call(reader, writer, tag, pending)
        if found is Found.OTHER:
            pending.send_to(writer.content)
        elif found is Found.CUT:
            writer.trim()


def no_call(reader: TextReader) -> Steps[Found]:
    """Return CUT at the end of the text, else OTHER."""
    return Found.OTHER if (yield from reader.peek()) else Found.CUT


def read_calls(reader: TextReader, writer: EventWriter, pending: PendingText) -> Steps[Found]:
    """Read one object, several, or a list of them. Stop after the last one that is a call."""
    char = yield from reader.space(pending)
    if char == "[":
        yield from reader.next_is(_OPEN, pending)
    found = yield from read_call(reader, writer, pending)
    while found is Found.CALL:
        yield from reader.all_of(_SEPARATORS, drop)
        if (yield from reader.peek()) != "{":
            return Found.CALL
        further = PendingText()
        if (yield from read_call(reader, writer, further)) is not Found.CALL:
            further.send_to(writer.content)
            return Found.CALL
    return found


def read_call(reader: TextReader, writer: EventWriter, pending: PendingText) -> Steps[Found]:
    """Read an object. It is a call if its name is among the tools. Brackets after it are dropped."""
    char = yield from reader.space(pending)
    if char != "{":
        return Found.OTHER if char else Found.CUT
    yield from reader.next_is(_OPEN, pending)
    found = yield from _CallObject(reader, writer, pending).read()
    if found is Found.CALL:
        yield from reader.all_of(_CLOSING, drop)
    return found


def read_arguments(reader: TextReader, writer: EventWriter) -> Steps[None]:
    """Pass on the arguments of the current call and end the call. Arguments that are JSON in a string are decoded."""
    char = yield from reader.peek()
    if not char:
        return
    if char in "{[":
        yield from read_value(reader, writer.arguments)
    else:
        pieces: list[str] = []
        yield from read_value(reader, pieces.append)
        _write_arguments(writer, "".join(pieces))
    writer.end_call()


def _write_arguments(writer: EventWriter, written: str) -> None:
    if written.startswith('"'):
        decoded = decoded_string(written)
        if decoded is not None and decoded.lstrip().startswith("{"):
            written = decoded
    writer.arguments("" if written == "null" else written)


class _CallObject:
    """Reads the members of an object after its opening brace."""

    def __init__(self, reader: TextReader, writer: EventWriter, pending: PendingText) -> None:
        self._reader = reader
        self._writer = writer
        self._pending = pending
        self._early: str | None = None
        """Arguments that precede the name."""
        self._named = False
        self._is_call = False

    def read(self) -> Steps[Found]:
        reader, pending = self._reader, self._pending
        yield from reader.space(pending)
        while (yield from reader.peek()) == '"' and (yield from self._member()):
            yield from reader.all_of(_SEPARATORS, pending)
        is_cut = not (yield from reader.peek())
        if not self._is_call:
            return Found.CUT if is_cut else Found.OTHER
        if not is_cut:
            self._writer.end_call()
        return Found.CALL

    def _member(self) -> Steps[bool]:
        """Read a key and its value. Return False if this is not JSON, or not a call."""
        reader, pending = self._reader, self._pending
        key = yield from read_string(reader, pending)
        if key is None or (not self._named and key not in _KEYS):
            return False
        yield from reader.space(pending)
        if not (yield from reader.next_is(_COLON, pending)):
            return False
        yield from reader.space(pending)
        if key == "name" and not self._named:
            return (yield from self._name())
        if key in ("arguments", "parameters") and (self._is_call or not self._named) and self._early is None:
            yield from self._arguments()
        else:
            yield from read_value(reader, pending)
        return True

    def _name(self) -> Steps[bool]:
        name = yield from read_string(self._reader, self._pending)
        if name is None:
            return False
        self._named = True
        self._is_call = name in self._writer.tools
        self._pending.send_to(drop if self._is_call else self._writer.content)
        if self._is_call:
            self._writer.begin_call(name)
            _write_arguments(self._writer, self._early or "")
        return True

    def _arguments(self) -> Steps[None]:
        if self._is_call:
            self._early = ""
            yield from read_arguments(self._reader, self._writer)
            return
        pieces: list[str] = []
        yield from read_value(self._reader, self._pending.tee(pieces))
        self._early = "".join(pieces)
