"""Describes, checks and converts single values of a request. Imports neither NumPy nor torch."""

import math
from collections.abc import Mapping
from typing import Any, Final, TypeGuard

MAX_ID_CHARS: Final = 512
MAX_DEPTH: Final = 32
MAX_VALUES: Final = 2**16
_PLAIN: Final = frozenset({int, float, bool, str, type(None), list, tuple, dict})


def shown(value: object) -> str:
    """Return a value for an error: numbers as they are, strings by their length, others by their kind.

    Errors reach logs, and the texts of a request must not.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        try:
            return repr(value)[:40]
        except ValueError:  # Python refuses to format an integer of more than 4300 digits
            return "an integer of thousands of digits"
    if isinstance(value, str):
        return f"a string of length {len(value)}"
    if isinstance(value, (list, tuple)):
        return "a list"
    return "a map" if isinstance(value, Mapping) else f"a value of type {type(value).__name__}"


def named(name: object) -> str:
    """Quote the beginning of a name, such as an unknown key; `shown` for a value that is no string."""
    return repr(name[:40]) if isinstance(name, str) else shown(name)


def is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether the value is a number that is finite as a float. An integer may be too large for a float."""
    try:
        return (is_integer(value) or isinstance(value, float)) and math.isfinite(value)
    except OverflowError:
        return False


def is_unicode(text: str) -> bool:
    """Return whether UTF-8, and so msgpack, can encode the string: whether it has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def data_problem(path: str, value: object) -> str | None:
    """Return why a value cannot be sent as plain data, as JSON and msgpack can; None if it can."""
    waiting: list[tuple[object, int]] = [(value, 0)]
    num_values = 0
    while waiting:
        found, depth = waiting.pop()
        num_values += 1
        if num_values > MAX_VALUES:
            return f"{path} must hold at most {MAX_VALUES} values"
        if depth > MAX_DEPTH:
            return f"{path} must be nested at most {MAX_DEPTH} deep"
        if isinstance(found, Mapping):
            if not all(isinstance(key, str) and is_unicode(key) for key in found):
                return f"{path} must hold only maps with string keys"
            waiting += [(inner, depth + 1) for inner in found.values()]
        elif isinstance(found, (list, tuple)):
            waiting += [(inner, depth + 1) for inner in found]
        elif isinstance(found, str):
            if not is_unicode(found):
                return f"{path} must hold valid Unicode text, got a lone surrogate"
        elif isinstance(found, int):
            if not -(2**63) <= found < 2**64:
                return f"{path} must hold integers of 64 bits, got {shown(found)}: send it as a string"
        elif found is not None and not isinstance(found, float):
            return f"{path} must hold only numbers, strings, lists and maps, got {shown(found)}"
    return None


def plain(value: Any, depth: int = 0) -> Any:
    """Convert numbers and arrays of NumPy and torch to Python's, in lists and maps too. Other values stay unchanged."""
    if depth > MAX_DEPTH:
        return value
    if isinstance(value, Mapping):
        return {key: plain(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        if {int}.issuperset(map(type, value)):
            return value  # token ids: the list may be long
        return [plain(inner, depth + 1) for inner in value]
    if type(value) in _PLAIN or not hasattr(value, "tolist"):
        return value
    return value.tolist()


def is_request_id(value: object) -> TypeGuard[str]:
    """Return whether the value can be a request id, and so part of the names of a stream and a result."""
    return isinstance(value, str) and 0 < len(value) <= MAX_ID_CHARS and is_unicode(value)
