"""What a message of a leased queue must say before Celery gets to see it.

Celery decodes whatever a message names: it inflates a body that calls itself compressed, however large it becomes, and
runs it through any codec of Python. Nothing of that is needed here.
"""

from collections.abc import Mapping
from typing import Any, Final

from headrace_broker.errors import MalformedMessageError
from headrace_broker.value_rules import is_unicode

MAX_ID_CHARS: Final = 512
MAX_VALUES: Final = 100_000
"""Values in an envelope of more than `_LARGE_BYTES`; a body in base64 counts as one."""
_LARGE_BYTES: Final = 256 << 10
_ENCODINGS: Final = ("binary", "utf-8")


def check_envelope(payload: Mapping[str, Any]) -> None:
    """Raises MalformedMessageError, whose sentence quotes nothing, for what no worker of ours can use."""
    headers = payload["headers"]
    if not isinstance(headers, dict):
        raise MalformedMessageError("its headers are no map")
    if "id" in headers and not is_request_id(headers["id"]):
        raise MalformedMessageError(f"its id is no text of 1 to {MAX_ID_CHARS} characters")
    if headers.get("compression") is not None:
        raise MalformedMessageError("it is compressed, which is not accepted")
    if payload.get("content-encoding") not in _ENCODINGS:
        raise MalformedMessageError(f"its content-encoding is none of {', '.join(_ENCODINGS)}")


def check_structure(message: bytes) -> None:
    """Raises MalformedMessageError for an envelope that takes seconds to read, as it has very many values.

    Base64 has none of the characters that are counted, so that no body in it is refused.
    """
    if len(message) > _LARGE_BYTES and sum(message.count(mark) for mark in (b"[", b"{", b",")) > MAX_VALUES:
        raise MalformedMessageError(f"its envelope holds more than {MAX_VALUES} values; its body belongs in base64")


def is_request_id(value: object) -> bool:
    """Whether a stream and a result can be named after it."""
    return isinstance(value, str) and 0 < len(value) <= MAX_ID_CHARS and is_unicode(value)
