"""Collects all problems of a request, so that one error reports them together."""

import re
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from headrace_broker import value_rules
from headrace_gateway.errors import ApiError

_SHOWN: Final = 8
_MOST: Final = 64
"""A body of megabytes may have a million mistakes, and nobody reads that many."""
_PLACE: Final = re.compile(r"(?:message|position) (\d+)")


class Problems:
    """The problems found so far. `raise_any` raises one ApiError with the field and the code of the first."""

    def __init__(self) -> None:
        self._found: Final[list[tuple[str | None, str, str]]] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, param: str | None, message: str, code: str = "invalid_request") -> None:
        """Add a problem. Raises ApiError at once if there are too many."""
        self._found.append((param, message, code))
        if len(self._found) >= _MOST:
            self.raise_any()

    def unsupported(self, param: str, message: str) -> None:
        self.add(param, message, "unsupported_parameter")

    def unknown_fields(self, path: str, given: Mapping[str, Any], known: Collection[str]) -> None:
        """Refuse the unknown fields of an object by name."""
        for name in given:
            if name not in known:
                self.unsupported(f"{path}.{name[:64]}", f"{path} has the unknown field {name[:64]!r}")

    def unknown_names(
        self, given: Mapping[str, Any], known: Collection[str], refused: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Refuse the other fields of a body by name. `refused` says of some what to do instead."""
        for name in given:
            if name not in known:
                why = refused.get(name)
                told = f"unknown field {name[:64]!r}" if why is None else f"{name} is not supported: {why}"
                self.unsupported(name[:64], told)

    def of_queue(self, problems: Iterable[str], names: Mapping[str, str], *, messages: str = "messages") -> None:
        """Add the problems that the queue's own rules found, except for fields that already have one.

        Args:
            problems: sentences that start with the queue's name of a field.
            names: the queue's name of each field -> the API's name.
            messages: the field that the messages were made from. Any other than `messages` has other indexes.
        """
        told = {re.split(r"[.\[]", param)[0] for param, _, _ in self._found if param is not None}
        for problem in problems:
            first, _, rest = problem.partition(" ")
            param = names.get(first)
            if param is not None:
                problem = f"{param} {rest}"
            elif first == "messages" or " message" in problem:
                place = _PLACE.search(problem)
                param = messages if place is None or messages != "messages" else f"messages[{place[1]}]"
            if param is None or re.split(r"[.\[]", param)[0] not in told:
                self.add(param, problem)

    def raise_any(self) -> None:
        """Raise ApiError 400 if there are problems."""
        if not self._found:
            return
        param, _, code = self._found[0]
        sentences = [message for _, message, _ in self._found[:_SHOWN]]
        if len(self._found) > _SHOWN:
            sentences.append("and more")
        raise ApiError(400, "invalid_request_error", code, "; ".join(sentences), param=param)


def shown(value: Any) -> str:
    """Describe a value for an error: numbers as they are, a text by its length only."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return value_rules.shown(value)
    if isinstance(value, str):
        return f"a string of {len(value)} characters"
    return "an array" if isinstance(value, list) else "an object"


def named(value: Any) -> str:
    """Quote the beginning of a string, such as the name of a role or type; `shown` for any other value."""
    return repr(value[:40]) if isinstance(value, str) else shown(value)
