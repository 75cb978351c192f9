"""What a message of a leased queue must say before Celery gets to see it.

Celery decodes whatever a message names: it inflates a body that calls itself compressed, however large it becomes, and
runs it through any codec of Python. Nothing of that is needed here.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final, TypeGuard

from headrace_broker.content import dumps, loads
from headrace_broker.errors import MalformedMessageError
from headrace_broker.value_rules import is_unicode

MAX_ID_CHARS: Final = 512
_ENCODINGS: Final = ("binary", "utf-8", "base64")
_BASE64: Final = "base64"
_TEXT: Final = ("utf-8", None)
# What protocol 1 says in its body and protocol 2 in its headers; absent ones need not be there.
_HEADERS_OF_1: Final = ("task", "id", "eta", "expires", "retries", "timelimit")
_LINKS_OF_1: Final = ("callbacks", "errbacks", "chord")
MAX_VALUES: Final = 100_000
"""Values in an envelope of more than `_LARGE_BYTES`; a body in base64 counts as one."""
_LARGE_BYTES: Final = 256 << 10
_MAX_BYTES_OF_1: Final = 64 << 10


def open_envelope(raw: bytes) -> dict[str, Any]:
    """Read a message as it lies in Redis; one of Celery's protocol 1 comes out as one of protocol 2.

    Raises MalformedMessageError, whose sentence quotes nothing of the message but its content type, for what no worker
    of ours can use, and the errors of `json`.
    """
    check_structure(raw)
    payload: dict[str, Any] = json.loads(raw.decode())
    check_envelope(payload)
    if "task" not in payload["headers"]:
        _from_protocol_1(payload)
    return payload


def check_envelope(payload: dict[str, Any]) -> None:
    """Raises MalformedMessageError."""
    if not isinstance(payload, dict) or not isinstance(payload.get("headers"), dict):
        raise MalformedMessageError("its headers are no map")
    headers, properties = payload["headers"], payload.get("properties")
    if not isinstance(properties, dict) or not isinstance(properties.get("delivery_info"), dict):
        raise MalformedMessageError("its properties, or their delivery_info, are no map")
    if "id" in headers and not is_request_id(headers["id"]):
        raise MalformedMessageError(f"its id is no text of 1 to {MAX_ID_CHARS} characters")
    if headers.get("compression") is not None:
        raise MalformedMessageError("it is compressed, which is not accepted")
    encoding = payload.get("content-encoding")
    if not isinstance(encoding, str) or encoding.lower() not in _ENCODINGS:
        raise MalformedMessageError(f"its content-encoding is none of {', '.join(_ENCODINGS)}")
    if properties.get("body_encoding") in _TEXT:
        properties["body_encoding"] = None  # kombu's word for it
    elif properties["body_encoding"] != _BASE64:
        raise MalformedMessageError("its body_encoding is neither base64 nor utf-8 nor absent")
    if not isinstance(payload.get("body"), str):
        raise MalformedMessageError("its body is no text")
    if not is_unicode(payload["body"]):
        raise MalformedMessageError("its body is no valid Unicode text: it holds lone surrogates")


def content_digest(payload: Mapping[str, Any]) -> str:
    """32 hex digits that say what a message asks for, and for whom: of its body as it is encoded, task and tenant.

    A client that sends a request again writes another envelope (times, tags, priority) with the same content.
    """
    headers = payload.get("headers")
    named = [headers.get(name) for name in ("task", "tenant")] if isinstance(headers, Mapping) else []
    named += [payload.get(name) for name in ("content-type", "content-encoding")]
    body = payload.get("body")
    digest = hashlib.blake2b(json.dumps(named).encode(), digest_size=16)
    digest.update((body if isinstance(body, str) else json.dumps(body)).encode(errors="replace"))
    return digest.hexdigest()


def legible_envelope(raw: bytes) -> dict[str, Any]:
    """As `open_envelope`; of a message that no worker can use, what can be read: it may still say whose it is."""
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
    """Raises MalformedMessageError for an envelope that takes seconds to read, as it has very many values.

    Base64 has none of the characters that are counted, so that no body in it is refused.
    """
    if len(message) > _LARGE_BYTES and sum(message.count(mark) for mark in (b"[", b"{", b",")) > MAX_VALUES:
        raise MalformedMessageError(f"its envelope holds more than {MAX_VALUES} values; its body belongs in base64")


def is_request_id(value: object) -> TypeGuard[str]:
    """Whether a stream and a result can be named after it."""
    return isinstance(value, str) and 0 < len(value) <= MAX_ID_CHARS and is_unicode(value)


def request_id_of(envelope: Mapping[str, Any]) -> str | None:
    """The task id, where the message shows one that a stream and a result can be named after."""
    headers = envelope.get("headers")
    request_id = headers.get("id") if isinstance(headers, Mapping) else None
    return request_id if is_request_id(request_id) else None


def _from_protocol_1(payload: dict[str, Any]) -> None:
    """Protocol 1 has one map as its body, which says all that protocol 2 says in headers and body.

    A message of neither protocol is left as it is: the consumer refuses it. A large body is refused, as it is decoded
    on the worker's event loop.
    """
    if len(payload["body"]) > _MAX_BYTES_OF_1:
        raise MalformedMessageError(
            f"its body of protocol 1 is larger than {_MAX_BYTES_OF_1 >> 10} KiB: use protocol 2"
        )
    content_type = payload.get("content-type")
    try:
        body = loads(_body(payload), content_type)  # type: ignore[arg-type]  # checked there
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


def _body(payload: Mapping[str, Any]) -> bytes | str:
    body: str = payload["body"]
    if payload["properties"].get("body_encoding") is None:
        return body
    try:
        return base64.b64decode(body)
    except (binascii.Error, ValueError):
        raise MalformedMessageError("its body is no base64") from None
