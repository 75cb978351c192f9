"""Text that arrives in pieces and is read by generators. A generator yields when it needs the next piece.

Text is passed on as soon as possible. Only a tail that may become a tag is held back.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""Yields when it needs more text, and returns T."""
Sink: TypeAlias = Callable[[str], None]


def drop(text: str) -> None:
    """Discard text: the empty sink."""


class TagSet:
    """Tags that are searched for at the same time.

    No tag may contain another one: otherwise the match would depend on the pieces in which the text arrives.
    """

    __slots__ = ("_longest", "_prefixes", "pattern")

    def __init__(self, *tags: str) -> None:
        tags = tuple(dict.fromkeys(tags))
        inner = [(a, b) for a in tags for b in tags if a != b and a in b]
        assert not inner, f"one tag contains another: {inner}"
        self.pattern = re.compile("|".join(map(re.escape, tags)) or "(?!)")
        self._prefixes = frozenset(tag[:length] for tag in tags for length in range(1, len(tag)))
        self._longest = max(map(len, self._prefixes), default=0)

    def tail(self, text: str, start: int) -> int:
        """Return the length of the longest suffix of `text[start:]` that starts a tag."""
        for length in range(min(self._longest, len(text) - start), 0, -1):
            if text[len(text) - length :] in self._prefixes:
                return length
        return 0


class TextReader:
    """The text that has arrived and is not yet read."""

    __slots__ = ("_position", "_text", "ended")

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self.ended = False

    def push(self, text: str) -> None:
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self) -> None:
        self.ended = True

    def until(self, tags: TagSet, sink: Sink) -> Steps[str | None]:
        """Pass text on up to a tag. Return the tag, which is consumed; None at the end of the text."""
        while (match := tags.pattern.search(self._text, self._position)) is None:
            kept = 0 if self.ended else tags.tail(self._text, self._position)
            self._pass_on(len(self._text) - kept, sink)
            if self.ended:
                return None
            yield
        self._pass_on(match.start(), sink)
        self._position = match.end()
        return match[0]

    def next_is(self, tags: TagSet, sink: Sink = drop) -> Steps[str | None]:
        """If a tag comes next, consume it and pass it on. Return the tag, or None."""
        tag = yield from self.is_at(tags)
        if tag is not None:
            self._pass_on(self._position + len(tag), sink)
        return tag

    def is_at(self, tags: TagSet) -> Steps[str | None]:
        """Return the tag that comes next without consuming it; None if none does."""
        while (match := tags.pattern.match(self._text, self._position)) is None:
            left = len(self._text) - self._position
            if self.ended or (left and tags.tail(self._text, self._position) < left):
                return None
            yield
        return match[0]

    def peek(self) -> Steps[str]:
        """Return the next character without consuming it; an empty text at the end."""
        while self._position == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._position]

    def all_of(self, characters: re.Pattern[str], sink: Sink) -> Steps[None]:
        """Pass on matching characters up to the first that does not match. The pattern matches one or more."""
        while True:
            match = characters.match(self._text, self._position)
            if match is not None:
                self._pass_on(match.end(), sink)
            if self._position < len(self._text) or self.ended:
                return
            yield

    def space(self, sink: Sink = drop) -> Steps[str]:
        """Pass on white space. Return the next character without consuming it; an empty text at the end."""
        yield from self.all_of(_SPACE, sink)
        return (yield from self.peek())

    def scan(self, scanner: Callable[[str, int], tuple[int, bool]], sink: Sink) -> Steps[bool]:
        """Pass on the text that `scanner` accepts. Return False if the text ends before the scanner is done.

        Args:
            scanner: called with the text and a start. Returns the end of the accepted text, and whether it is done.
        """
        while True:
            end, done = scanner(self._text, self._position)
            self._pass_on(end, sink)
            if done or self.ended:
                return done
            yield

    def _pass_on(self, end: int, sink: Sink) -> None:
        if end > self._position:
            sink(self._text[self._position : end])
            self._position = end


_SPACE = re.compile(r"\s+")
