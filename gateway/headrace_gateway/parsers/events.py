"""The events of a parser. Merged, they depend on the text alone, not on the pieces in which it arrived."""

from dataclasses import dataclass
from typing import TypeAlias


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
    """The next piece of the last call's arguments, which together are one JSON text."""

    index: int
    json: str


ParserEvent: TypeAlias = Content | Reasoning | CallBegins | CallArguments
