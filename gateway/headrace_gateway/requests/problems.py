"""Collects all problems of a request, so that one error reports them together, and the fields that are ignored."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

from headrace_gateway.errors import ApiError, invalid
from headrace_wire.codes import ErrorCode, GatewayCode

_SHOWN: Final = 8
_MOST: Final = 64
"""A body of megabytes may have a million mistakes, and nobody reads that many."""
_NEAR: Final = 0.9
"""Similarity from which an unknown field counts as misspelt. Extra fields of front ends are less similar."""
_MAX_BYTES: Final = 1024
"""Limit of the header that names ignored fields. Proxies limit all headers together: nginx to 4 or 8 KiB."""
_SAYS_NOTHING: Final[tuple[Any, ...]] = (False, "", [], {})
"""Values with which a refused field asks for nothing."""
_INDEX: Final = re.compile(r"\[\d+\]")


class Problems:
    """The problems found so far. `raise_any` raises one ApiError with the field and the code of the first."""

    def __init__(self) -> None:
        self._found: Final[list[tuple[str | None, str, str]]] = []
        self.ignored: Final[dict[str, str]] = {}
        """Fields without effect: the path without indexes -> the sentence with which a strict gateway refuses it."""

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, param: str | None, message: str, code: str = ErrorCode.INVALID_REQUEST) -> None:
        """Add a problem. Raises ApiError at once if there are too many."""
        self._found.append((param, message, code))
        if len(self._found) >= _MOST:
            self.raise_any()

    def must(self, path: str, rule: str, told: str, code: str = ErrorCode.INVALID_REQUEST) -> None:
        """Add the problem that the value at `path` breaks a rule. `told` shows the value."""
        self.add(path, f"{path} must {rule}, got {told}", code)

    def unsupported(self, param: str, message: str) -> None:
        self.add(param, message, GatewayCode.UNSUPPORTED_PARAMETER)

    def ignore(self, path: str, message: str) -> None:
        """Record a field without effect. A strict gateway refuses it with this message. All refuse too many fields."""
        path = _path(path)
        if path in self.ignored:
            return
        if len(self.ignored) < _MOST:
            self.ignored[path] = message
        else:
            self.unsupported(path, message)

    def unknown_fields(self, path: str, given: Mapping[str, Any], known: Collection[str]) -> None:
        """Ignore the unknown fields of an object."""
        for name in given:
            if name not in known:
                self.ignore(f"{path}.{name[:64]}", f"{path} has the unknown field {name[:64]!r}")

    def unknown_names(
        self, given: Mapping[str, Any], known: Collection[str], refused: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Refuse the fields of a body that are not supported or misspelt. Ignore other unknown ones.

        Args:
            refused: fields of features that are not supported -> what to do instead.
        """
        plain = {_letters(name): name for name in known}
        for name in given:
            if name in refused:
                if given[name] not in _SAYS_NOTHING:
                    self.unsupported(name, f"{name} is not supported: {refused[name]}")
            elif name not in known and _path(name[:64]) not in self.ignored:
                near = get_close_matches(_letters(name[:64]), plain, n=1, cutoff=_NEAR)
                if near:
                    self.unsupported(name[:64], f"unknown field {name[:64]!r}: did you mean {plain[near[0]]}?")
                else:
                    self.ignore(name[:64], f"unknown field {name[:64]!r}")

    def of_queue(self, problems: Iterable[str], names: Mapping[str, str], *, messages: str = "messages") -> None:
        """Add the problems that the queue's own rules found, except for fields that already have one.

        Args:
            problems: sentences that start with a path, whose first name is the queue's name of a field.
            names: the queue's name of each field -> the API's name.
            messages: the field that the messages were made from. If it is not `messages`, the indexes differ, so they
                are left out.
        """
        told = {root_of(param) for param, _, _ in self._found if param is not None}
        for problem in problems:
            path, _, rest = problem.partition(" ")
            root = root_of(path)
            name = names.get(root)
            if name is not None:
                path = path if name == root else name  # the caller did not send its inside
                problem = f"{path} {rest}"
            elif root == "messages":
                path = path if messages == "messages" else messages
            else:
                path = ""
            if not path or root_of(path) not in told:
                self.add(path or None, problem)

    def raise_any(self) -> None:
        """Raise ApiError 400 if there are problems."""
        if not self._found:
            return
        param, _, code = self._found[0]
        sentences = [message for _, message, _ in self._found[:_SHOWN]]
        if len(self._found) > _SHOWN:
            sentences.append("and more")
        raise ApiError(400, "invalid_request_error", code, "; ".join(sentences), param=param)


def _path(path: str) -> str:
    """Return the path without indexes."""
    return _INDEX.sub("[]", path)


def root_of(path: str) -> str:
    """Return the top-level field of a path."""
    return re.split(r"[.\[]", path)[0]


def _letters(name: str) -> str:
    """Return the name in lower case, without _ and -, so that `maxTokens` and `max_tokens` are equal."""
    return name.lower().replace("_", "").replace("-", "")


def header_of(paths: Sequence[str]) -> str:
    """Return the value of the header: as many paths as fit, then the number of the others, such as `7 more`."""
    shown, room = [], _MAX_BYTES - len(f"{len(paths)} more")
    for path in paths:
        # '""' for the empty name: a header must not end in a space
        name = quote(path, safe="[].") or '""' if len(path) <= room else ""
        room -= len(name) + len(", ")
        if not name or room < 0:
            break
        shown.append(name)
    more = [f"{len(paths) - len(shown)} more"] if len(shown) < len(paths) else []
    return ", ".join([*shown, *more])


def refusal_of(ignored: Mapping[str, str]) -> ApiError:
    """Return the error of a strict gateway."""
    sentences = list(ignored.values())[:_SHOWN]
    more = ["and more"] if len(ignored) > _SHOWN else []
    return invalid("; ".join([*sentences, *more]), code=GatewayCode.UNSUPPORTED_PARAMETER, param=next(iter(ignored)))
