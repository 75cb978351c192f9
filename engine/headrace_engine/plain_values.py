"""Converts the arguments of callers to plain data for the core. Imports neither NumPy nor torch."""

from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

from headrace_engine.errors import InvalidRequestError

RequestId = str | int | UUID
"""The types of a request id. Its text is what identifies the request."""
MAX_DEPTH = 32
MAX_VALUES = 2**16
_PLAIN = frozenset({int, float, bool, str, type(None), list, tuple, dict})
_SHOWN_CHARS = 60


def plain(value: Any) -> Any:
    """Convert a number of NumPy or torch to Python's. Return anything else unchanged."""
    if type(value) in _PLAIN or getattr(value, "ndim", None) != 0:
        return value
    return value.item()


def plain_list(values: Any) -> Any:
    """Convert an array, tensor or tuple to a list of Python's numbers. Return anything else unchanged."""
    if isinstance(values, list | tuple):
        return [*values] if isinstance(values, tuple) and _PLAIN.issuperset(map(type, values)) else _plain_items(values)
    if type(values) not in _PLAIN and hasattr(values, "tolist") and getattr(values, "ndim", 0) > 0:
        return values.tolist()
    return plain(values)


def _plain_items(values: list[Any] | tuple[Any, ...]) -> list[Any]:
    if isinstance(values, list) and _PLAIN.issuperset(map(type, values)):
        return values
    return [plain(value) for value in values]


def request_id_of(value: Any) -> str:
    """Return a request id as text. It may be a string, an integer or a UUID.

    Raises:
        InvalidRequestError: it has another type.
    """
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, str | int | UUID):
        raise InvalidRequestError(f"request_id is {shown(value)}, expected a string, an integer or a UUID")
    if isinstance(value, int) and not _fits_64_bits(value):
        raise InvalidRequestError(f"request_id is {shown(value)}, an integer beyond 64 bits: give it as text")
    text = str(value)
    if not text:
        raise InvalidRequestError("request_id is empty")
    if not is_unicode(text):
        raise InvalidRequestError("request_id is no valid Unicode: it holds a lone surrogate")
    return text


def request_ids_of(given: RequestId | Iterable[RequestId]) -> list[str]:
    """Return one or several request ids as texts."""
    given = plain_list(given)
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | bytearray | UUID | Mapping):
        return [request_id_of(request_id) for request_id in given]
    return [request_id_of(given)]


def shown(value: object) -> str:
    """Return a short representation of any value for an error message."""
    try:
        text = repr(value)
    except ValueError:  # Python does not convert integers of more than 4300 digits
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode a text. It cannot encode lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _fits_64_bits(value: int) -> bool:
    return -(2**63) <= value < 2**64


def data_problem(name: str, value: object) -> str | None:
    """Return why a value cannot be sent as plain data to a core in a child process, or to a chat template."""
    waiting: list[tuple[object, int]] = [(value, 0)]
    num_values = 0
    while waiting:
        found, depth = waiting.pop()
        num_values += 1
        if num_values > MAX_VALUES:
            return f"{name} holds more than {MAX_VALUES} values"
        if depth > MAX_DEPTH:
            return f"{name} is nested more than {MAX_DEPTH} deep"
        if isinstance(found, Mapping):
            if not all(isinstance(key, str) and is_unicode(key) for key in found):
                return f"{name} holds a map with a key that is no text"
            waiting += [(inner, depth + 1) for inner in found.values()]
        elif isinstance(found, list | tuple):
            waiting += [(inner, depth + 1) for inner in found]
        elif isinstance(found, str):
            if not is_unicode(found):
                return f"{name} holds text that is no valid Unicode: it has a lone surrogate"
        elif isinstance(found, int):
            if not _fits_64_bits(found):
                return f"{name} holds {shown(found)}, an integer beyond 64 bits: send it as text"
        elif found is not None and not isinstance(found, float | bytes):
            return f"{name} holds a {type(found).__name__}; numbers, text, lists and maps can be sent"
    return None


def plain_data(value: Any, depth: int = 0) -> Any:
    """Convert numbers of NumPy and torch in lists and maps to Python's. Too deeply nested values are unchanged."""
    if depth > MAX_DEPTH:
        return value
    if isinstance(value, Mapping):
        return {key: plain_data(inner, depth + 1) for key, inner in value.items()}
    value = plain_list(value)
    return [plain_data(inner, depth + 1) for inner in value] if isinstance(value, list) else value
