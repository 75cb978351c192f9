"""What a message of a leased queue must say before Celery gets to see it.

Celery decodes whatever a message names: it inflates a body that calls itself compressed, however large it becomes, and
runs it through any codec of Python. Nothing of that is needed here.
"""

import json
from collections.abc import Mapping
from typing import Any, Final, TypeGuard

from headrace_broker.errors import MalformedMessageError
from headrace_broker.value_rules import is_unicode

MAX_ID_CHARS: Final = 512
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


def read_envelope(body: bytes) -> tuple[Mapping[str, Any], str | None]:
    """Headers and content type of a message as far as they can be read; neither says anything of the prompt."""
    try:
        envelope = json.loads(body)
        headers, content_type = envelope["headers"], envelope.get("content-type")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}, None
    return headers if isinstance(headers, dict) else {}, content_type if isinstance(content_type, str) else None


def is_request_id(value: object) -> TypeGuard[str]:
    """Whether a stream and a result can be named after it."""
    return isinstance(value, str) and 0 < len(value) <= MAX_ID_CHARS and is_unicode(value)
