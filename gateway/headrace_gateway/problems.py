"""Collect everything that is wrong with a request, so that one answer names it all."""

from collections.abc import Iterable
from typing import Any, Final

from headrace_gateway.errors import ApiError

_SHOWN: Final = 8


class Problems:
    """What was found so far. `raise_any` raises one ApiError, with the first problem's field and code."""

    def __init__(self) -> None:
        self._found: Final[list[tuple[str | None, str, str]]] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    @property
    def are_many(self) -> bool:
        """Whether an answer would not show one more."""
        return len(self._found) >= _SHOWN

    def add(self, param: str | None, message: str, code: str = "invalid_request") -> None:
        self._found.append((param, message, code))

    def unsupported(self, param: str, message: str) -> None:
        self.add(param, message, "unsupported_parameter")

    def of_broker(self, problems: Iterable[str], params: Iterable[str]) -> None:
        """Add the problems that the queue's own rules found; each names its field first.

        Args:
            params: fields that a problem may begin with.
        """
        names = frozenset(params)
        for problem in problems:
            first = problem.partition(" ")[0]
            about_messages = first == "messages" or " message " in problem
            self.add(first if first in names else "messages" if about_messages else None, problem)

    def raise_any(self) -> None:
        """Raise ApiError 400 where anything was added."""
        if not self._found:
            return
        param, _, code = self._found[0]
        sentences = [message for _, message, _ in self._found[:_SHOWN]]
        if len(self._found) > _SHOWN:
            sentences.append(f"and {len(self._found) - _SHOWN} problems more")
        raise ApiError(400, "invalid_request_error", code, "; ".join(sentences), param=param)


def shown(value: Any) -> str:
    """A value as an error may show it: numbers as they are, of a text its length alone."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)[:40]
    if isinstance(value, str):
        return f"a string of {len(value)} characters"
    return "an array" if isinstance(value, list) else "an object"
