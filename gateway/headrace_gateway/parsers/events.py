"""What a parser reports. The same text gives the same events joined, however it was cut into pieces."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A tool call whose name is complete; calls are counted from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the last call: pieces of one JSON text."""

    index: int
    json: str


ParserEvent: TypeAlias = Content | Reasoning | CallBegins | CallArguments
