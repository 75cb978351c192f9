"""Converts the arguments of callers: lists of any kind, and request ids."""

from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

from headrace_engine.errors import InvalidRequestError
from headrace_wire.values import is_unicode, plain

RequestId = str | int | UUID
"""The types of a request id. The text of the id identifies the request."""
_SHOWN_CHARS = 60


def plain_list(values: Any) -> Any:
    """Convert an array, tensor or tuple to a list of Python's numbers. Return anything else unchanged."""
    values = values if isinstance(values, Mapping) else plain(values)
    return [*values] if isinstance(values, tuple) else values


def request_id_of(value: Any) -> str:
    """Return a request id as text. It may be a string, an integer or a UUID.

    Raises:
        InvalidRequestError: the id has another type.
    """
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, str | int | UUID):
        raise InvalidRequestError(f"request_id must be a string, an integer or a UUID, got {shown(value)}")
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
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
