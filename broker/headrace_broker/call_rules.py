"""Checks of the arguments of the client's methods. `client/submission.py` checks the request itself."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from headrace_broker.errors import InvalidRequestError
from headrace_wire.values import MAX_ID_CHARS, is_integer, is_number, is_request_id, plain, shown

BEGINNING: Final = "0-0"
_ENTRY_ID: Final = re.compile(r"(\d{1,20})-(\d{1,20})", re.ASCII)
_LARGEST_PART: Final = 2**64 - 1
_MAX_LETTERS: Final = 1_000_000


def given_of(kwargs: object) -> dict[str, Any]:
    """Return a task's keyword arguments without null values, as plain data. Raises InvalidRequestError for no map."""
    if not isinstance(kwargs, Mapping):
        raise InvalidRequestError(f"the request must be a map, got {shown(kwargs)}")
    return {key: plain(value) for key, value in kwargs.items() if value is not None}


def check_request_id(request_id: object) -> str:
    """Return the request id after checking it. Raises InvalidRequestError."""
    if not is_request_id(request_id):
        limits = f"1 to {MAX_ID_CHARS} characters"
        raise InvalidRequestError(f"request_id must be a string of {limits}, got {shown(request_id)}")
    return request_id


def check_timeout(timeout: object) -> None:
    """Check that the timeout is at least 0 seconds, or None for no limit. Raises InvalidRequestError."""
    if timeout is not None and not (is_number(timeout) and timeout >= 0):
        raise InvalidRequestError(f"timeout must be a number of seconds, at least 0, or None, got {shown(timeout)}")


def check_last_id(last_id: object) -> str:
    """Return the entry id after which to read a stream; None means the beginning. Raises InvalidRequestError."""
    if last_id is None:
        return BEGINNING
    parts = _ENTRY_ID.fullmatch(last_id) if isinstance(last_id, str) else None
    if parts is None:
        found = repr(last_id) if isinstance(last_id, str) and len(last_id) <= 50 else shown(last_id)
        raise InvalidRequestError(f"last_id must be an entry id such as 1-17, or None for the beginning, got {found}")
    if max(map(int, parts.groups())) > _LARGEST_PART:
        raise InvalidRequestError(f"last_id must be two numbers of at most {_LARGEST_PART} each, got {last_id!r}")
    return "-".join(str(int(part)) for part in parts.groups())


def check_last_ids(request_ids: object) -> dict[str, str]:
    """Return, by request id, the entry id after which to read each stream. Raises InvalidRequestError."""
    if isinstance(request_ids, bytes) or not isinstance(request_ids, Iterable):
        raise InvalidRequestError(f"request_ids must be a list or a map of request ids, got {shown(request_ids)}")
    pairs: Iterable[Any] = ((request_id, None) for request_id in request_ids)
    if isinstance(request_ids, Mapping):
        pairs = request_ids.items()
    return {check_request_id(request_id): check_last_id(last_id) for request_id, last_id in pairs}


def check_limit(limit: object) -> None:
    """Check a caller's limit for the number of items to return. Raises InvalidRequestError."""
    if not (is_integer(limit) and 1 <= limit <= _MAX_LETTERS):
        raise InvalidRequestError(f"limit must be an integer from 1 to {_MAX_LETTERS}, got {shown(limit)}")


def check_all(name: str, values: object, kind: type) -> list[Any]:
    """Return the values as a list after checking that each is a `kind`. Raises InvalidRequestError."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise InvalidRequestError(f"{name} must be a list of {kind.__name__}, got {shown(values)}")
    found = list(values)
    for position, value in enumerate(found):
        if not isinstance(value, kind):
            problem = f"{name} must hold {kind.__name__} only, got {shown(value)} at position {position}"
            raise InvalidRequestError(problem)
    return found
