"""Encodes and decodes messages and results: JSON and msgpack. Decoding them cannot run code.

A result is stored in the content type of its request, so that the client that sent the request can read it.
"""

import base64
import codecs
import json
import math
import re
from typing import Any, Final

import msgpack

from headrace_broker.errors import MalformedMessageError

JSON: Final = "application/json"
MSGPACK: Final = "application/x-msgpack"
SERIALIZERS: Final = {JSON: "json", MSGPACK: "msgpack"}
"""Celery's serializer names, by accepted content type."""

LEAST_LOGPROB: Final = -9999.0
"""Stands for a log-probability of minus infinity in JSON, which has no infinity. vLLM's server sends the same."""
_MEDIA_TYPE: Final = re.compile(r"(application|text)/[\w.+-]{1,48}", re.ASCII)
_ENCODINGS: Final = ("binary", "base64")  # in addition to Python's codecs


def require_accepted(content_type: object) -> None:
    """Raise MalformedMessageError if the content type is not accepted. The error names the accepted types."""
    if not isinstance(content_type, str) or content_type not in SERIALIZERS:
        accepted = " and ".join(SERIALIZERS)
        raise MalformedMessageError(f"its content-type is {shown_type(content_type)}; accepted are {accepted}")


def shown_type(content_type: object) -> str:
    """Return a content type for a log or an error. Any other value could be a user's text, and is not shown."""
    if content_type is None:
        return "no content type"
    return content_type if isinstance(content_type, str) and _MEDIA_TYPE.fullmatch(content_type) else "unreadable"


def shown_encoding(encoding: object) -> str:
    """Return a content encoding for a log or an error. Any other value is not shown."""
    if encoding is None:
        return "no encoding"
    if not isinstance(encoding, str):
        return "unreadable"
    try:
        return encoding if encoding in _ENCODINGS else codecs.lookup(encoding).name
    except (LookupError, ValueError):
        return "unreadable"


def answer_type(content_type: object) -> str:
    """Return the content type of the answer: the message's if accepted, else JSON, Celery's default for results."""
    return content_type if isinstance(content_type, str) and content_type in SERIALIZERS else JSON


def loads(body: bytes | str, content_type: str) -> Any:
    """Decode a body. Raises MalformedMessageError if the type is not accepted, or the body is not of that type.

    kombu would turn JSON maps of the form {"__type__": ..., "__value__": ...} into Python objects; here they stay maps.
    """
    require_accepted(content_type)
    try:
        if content_type == JSON:
            return json.loads(body.decode() if isinstance(body, bytes) else body)
        return msgpack.unpackb(body, raw=False)
    except Exception as error:  # noqa: BLE001  # msgpack's own errors have no common base; the error's text may quote the body
        raise MalformedMessageError(f"its body cannot be read as {content_type}: {type(error).__name__}") from None


def dumps(value: Any, content_type: str) -> bytes:
    """Encode a value so that `loads` returns an equal one."""
    return json.dumps(value).encode() if content_type == JSON else _packed(value)


def dumps_result(value: Any, content_type: str) -> bytes:
    """Encode a result. JSON has bytes as base64, and no Infinity and NaN, which standard parsers refuse."""
    if content_type != JSON:
        return _packed(value)
    try:
        text = json.dumps(value, allow_nan=False, default=_base64)
    except ValueError:
        text = json.dumps(_finite(value), allow_nan=False, default=_base64)
    return text.encode()


def loads_stored(stored: bytes) -> Any:
    """Decode a stored result of either content type. Raises MalformedMessageError."""
    return loads(stored, JSON if stored.lstrip()[:1] == b"{" else MSGPACK)


def _base64(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"a result cannot hold a value of type {type(value).__name__}")


def _packed(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return LEAST_LOGPROB if value == -math.inf else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
