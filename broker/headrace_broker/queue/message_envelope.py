"""Checks a message of a leased queue before Celery decodes it.

Celery trusts the message's headers: it decompresses a body to any size, and decodes it by any codec of Python. Headrace
needs neither, and refuses messages that ask for it.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from headrace_broker.content import dumps, loads
from headrace_broker.errors import MalformedMessageError
from headrace_wire.values import MAX_ID_CHARS, is_request_id, is_unicode

_ENCODINGS: Final = ("binary", "utf-8", "base64")
_BASE64: Final = "base64"
_TEXT: Final = ("utf-8", None)
# Fields that protocol 1 has in its body and protocol 2 in its headers. All are optional.
_HEADERS_OF_1: Final = ("task", "id", "eta", "expires", "retries", "timelimit")
_LINKS_OF_1: Final = ("callbacks", "errbacks", "chord")
MAX_VALUES: Final = 100_000
"""Limit for the values in an envelope of more than `_LARGE_BYTES`; a body in base64 counts as one."""
_LARGE_BYTES: Final = 256 << 10
_MAX_BYTES_OF_1: Final = 64 << 10


def open_envelope(raw: bytes) -> dict[str, Any]:
    """Decode and check a message from Redis. A message of Celery's protocol 1 is converted to protocol 2.

    Raises MalformedMessageError if no worker can use the message, and the errors of `json`. A MalformedMessageError
    quotes only the content type of the message.
    """
    check_structure(raw)
    payload: dict[str, Any] = json.loads(raw.decode())
    check_envelope(payload)
    if "task" not in payload["headers"]:
        _from_protocol_1(payload)
    return payload


def check_envelope(payload: dict[str, Any]) -> None:
    """Check the envelope's fields and normalise its `body_encoding`. Raises MalformedMessageError."""
    if not isinstance(payload, dict) or not isinstance(payload.get("headers"), dict):
        raise MalformedMessageError("its headers are not a map")
    headers, properties = payload["headers"], payload.get("properties")
    if not isinstance(properties, dict) or not isinstance(properties.get("delivery_info"), dict):
        raise MalformedMessageError("its properties or their delivery_info are not a map")
    if "id" in headers and not is_request_id(headers["id"]):
        raise MalformedMessageError(f"its id is not a string of 1 to {MAX_ID_CHARS} characters")
    if headers.get("compression") is not None:
        raise MalformedMessageError("it is compressed, which is not accepted")
    encoding = payload.get("content-encoding")
    if not isinstance(encoding, str) or encoding.lower() not in _ENCODINGS:
        raise MalformedMessageError(f"its content-encoding is not one of {', '.join(_ENCODINGS)}")
    if properties.get("body_encoding") in _TEXT:
        properties["body_encoding"] = None  # kombu's value for text
    elif properties["body_encoding"] != _BASE64:
        raise MalformedMessageError("its body_encoding is not base64 or utf-8")
    if not isinstance(payload.get("body"), str):
        raise MalformedMessageError("its body is not a string")
    if not is_unicode(payload["body"]):
        raise MalformedMessageError("its body is not valid Unicode: it holds lone surrogates")


def content_digest(payload: Mapping[str, Any], queue: str) -> str:
    """Return 48 hex digits: 32 of a digest of a message's encoded body, task and tenant, and 16 of one of its queue.

    A client that sends a request again writes another envelope (times, tags, priority) with the same content. Without
    a queue ('', if it is unknown), there are only the first 32 digits.
    """
    headers = payload.get("headers")
    named = [headers.get(name) for name in ("task", "tenant")] if isinstance(headers, Mapping) else []
    named += [payload.get(name) for name in ("content-type", "content-encoding")]
    body = payload.get("body")
    digest = hashlib.blake2b(json.dumps(named).encode(), digest_size=16)
    digest.update((body if isinstance(body, str) else json.dumps(body)).encode(errors="replace"))
    return digest.hexdigest() + (
        hashlib.blake2b(queue.encode(errors="replace"), digest_size=8).hexdigest() if queue else ""
    )


def legible_envelope(raw: bytes) -> dict[str, Any]:
    """Decode a message as `open_envelope` does. If that fails, return its JSON map, or an empty map if it has none."""
    try:
        return open_envelope(raw)
    except (MalformedMessageError, ValueError, RecursionError):
        pass
    try:
        check_structure(raw)
        envelope = json.loads(raw)
    except (MalformedMessageError, ValueError, RecursionError):
        return {}
    return envelope if isinstance(envelope, dict) else {}


def check_structure(message: bytes) -> None:
    """Raise MalformedMessageError for an envelope of so many values that decoding it takes seconds.

    Base64 has none of the counted characters, so a body in base64 never counts.
    """
    if len(message) > _LARGE_BYTES and sum(message.count(mark) for mark in (b"[", b"{", b",")) > MAX_VALUES:
        raise MalformedMessageError(f"its envelope holds more than {MAX_VALUES} values; encode its body in base64")


def request_id_of(envelope: Mapping[str, Any]) -> str | None:
    """Return the task id if it is a valid request id, else None."""
    headers = envelope.get("headers")
    request_id = headers.get("id") if isinstance(headers, Mapping) else None
    return request_id if is_request_id(request_id) else None


def _from_protocol_1(payload: dict[str, Any]) -> None:
    """Convert a message of protocol 1, whose body is one map, to protocol 2, which splits it into headers and body.

    A message of neither protocol is left unchanged; the consumer refuses it. A large body is refused, because it would
    be decoded on the worker's event loop.
    """
    if len(payload["body"]) > _MAX_BYTES_OF_1:
        raise MalformedMessageError(
            f"its body of protocol 1 is larger than {_MAX_BYTES_OF_1 >> 10} KiB: use protocol 2"
        )
    content_type = payload.get("content-type")
    try:
        body = loads(body_of(payload), content_type)  # type: ignore[arg-type]  # checked there
    except MalformedMessageError:
        return
    if not isinstance(body, dict) or not is_request_id(body.get("id")) or not isinstance(body.get("task"), str):
        return
    said = {name: body[name] for name in _HEADERS_OF_1 if body.get(name) is not None}
    payload["headers"] = {**payload["headers"], **said}
    links = {name: body.get(name) for name in _LINKS_OF_1}
    rest = [body.get("args", []), body.get("kwargs", {}), links]
    payload["body"] = base64.b64encode(dumps(rest, str(content_type))).decode()
    payload["properties"]["body_encoding"] = _BASE64


def body_of(payload: Mapping[str, Any]) -> bytes | str:
    """Return the body of a checked envelope without its base64. Raises MalformedMessageError."""
    body: str = payload["body"]
    if payload["properties"].get("body_encoding") is None:
        return body
    try:
        return base64.b64decode(body)
    except (binascii.Error, ValueError):
        raise MalformedMessageError("its body is not valid base64") from None
