"""The events of a parser. If adjacent events are merged, they depend only on the text, not on its pieces."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from headrace_gateway.requests.call import Function


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model produced as reasoning, before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The start of a tool call, once its name is complete. Calls are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the last call's arguments. All pieces of a call together are one JSON text."""

    index: int
    json: str


ParserEvent: TypeAlias = Content | Reasoning | CallBegins | CallArguments

# White space is held back, because a call may follow. The start of a longer run is passed on, which limits the buffer.
_MAX_SPACE = 64
_TextKind: TypeAlias = type[Content] | type[Reasoning] | type[CallArguments]


class EventWriter:
    """Collects events until they are taken.

    Args:
        tools: the functions that may be called.
        parallel: False: everything after the first call is dropped.
    """

    __slots__ = (
        "_events", "_in_call", "_kind", "_last", "_parallel", "_pieces", "_space", "_trim", "_wrote", "calls", "tools"
    )  # fmt: skip

    def __init__(self, tools: Sequence[Function], *, parallel: bool) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.calls = 0
        self._parallel = parallel
        self._events: list[ParserEvent] = []
        self._last: _TextKind | None = None
        self._pieces: list[str] = []
        self._kind: type[Content | Reasoning] = Content
        self._space = ""
        self._trim = False
        self._in_call = False
        self._wrote = False

    @property
    def is_full(self) -> bool:
        """Whether all further text is dropped."""
        return self.calls > 0 and not self._parallel and not self._in_call

    def take(self) -> list[ParserEvent]:
        """Return the events since the last call."""
        self._close()
        taken, self._events = self._events, []
        return taken

    def content(self, text: str) -> None:
        self._write(Content, text)

    def reasoning(self, text: str) -> None:
        self._write(Reasoning, text)

    def trim(self) -> None:
        """Drop the white space that is held back, and the white space that follows."""
        self._space = ""
        self._trim = True

    def begin_call(self, name: str) -> None:
        self.trim()
        if self.is_full:
            return
        self._close()
        self._events.append(CallBegins(self.calls, name))
        self.calls += 1
        self._in_call = True
        self._wrote = False

    def arguments(self, json: str) -> None:
        if self._in_call and json:
            self._wrote = True
            self._add(CallArguments, json)

    def end_call(self) -> None:
        """End a complete call. Without arguments it gets an empty object."""
        if self._in_call and not self._wrote:
            self.arguments("{}")
        self._in_call = False

    def finish(self) -> None:
        """Emit the white space that was held back."""
        if self._space and not self.is_full:
            self._add(self._kind, self._space)
        self._space = ""

    def _write(self, kind: type[Content | Reasoning], text: str) -> None:
        if self.is_full:
            return
        if kind is not self._kind:
            self._kind, self._space = kind, ""
        if self._trim:
            text = text.lstrip()
            if not text:
                return
            self._trim = False
        body = text.rstrip()
        if body:
            self._add(kind, self._space + body)
            self._space = ""
        self._space += text[len(body) :]
        if len(self._space) > _MAX_SPACE:
            self._add(kind, self._space[:-_MAX_SPACE])
            self._space = self._space[-_MAX_SPACE:]

    def _add(self, kind: _TextKind, text: str) -> None:
        if kind is not self._last:
            self._close()
            self._last = kind
        self._pieces.append(text)

    def _close(self) -> None:
        """Merge the collected pieces into one event."""
        if self._last is not None:
            text = "".join(self._pieces)
            if self._last is CallArguments:
                self._events.append(CallArguments(self.calls - 1, text))
            else:
                self._events.append(Content(text) if self._last is Content else Reasoning(text))
            self._last = None
            self._pieces = []
