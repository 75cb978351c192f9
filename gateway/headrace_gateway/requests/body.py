"""Reads a request's body: bounded in size, strict JSON, an object at the top."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from headrace_gateway.errors import ApiError, invalid
from headrace_gateway.keys.api_key import ApiKey
from headrace_gateway.keys.limits import Take
from headrace_gateway.requests.body_process import BodyProcess
from headrace_wire.codes import GatewayCode
from headrace_wire.values import shown

SMALL_BYTES: Final = 64 * 2**10
"""A body of this size takes the event loop at most about 20 ms. Larger ones are parsed in another process."""
_DECODER: Final = msgspec.json.Decoder()

Value = TypeVar("Value")


class Body:
    """The JSON object in a body. `bodies` parses a large one again in each call of `read`.

    Raises ApiError 400 if a small body is not a JSON object.
    """

    def __init__(self, raw: bytes, bodies: BodyProcess, key: ApiKey) -> None:
        self._raw = raw
        self._bodies: Final = bodies
        self._key: Final = key
        self._object: Final = None if len(raw) > SMALL_BYTES else _parsed(raw)

    async def read(self, act: Callable[[dict[str, Any]], Value]) -> Value:
        """Return `act(object)`. `act` must not change the object. `act` and its result must be picklable.

        Raises the ApiError of `act`, or ApiError 400 if the body is not a JSON object.
        """
        if self._object is not None:
            return act(self._object)
        return await self._bodies.run(self._key.name, self._raw, partial(_read_by, act))

    def close(self) -> None:
        """Free the bytes. The endpoint may wait for its answer for an hour."""
        self._raw = b""


async def read_json(request: Request, max_bytes: int = SMALL_BYTES) -> dict[str, Any]:
    """Return the body of an endpoint whose bodies are always small. Raises ApiError 400, 413 or 415."""
    return _parsed(await read_bytes(request, max_bytes, lambda _: None))


def model_named(body: Mapping[str, Any]) -> str | None:
    """Return the body's `model`; None if it is absent. Raises ApiError 400 if it is not a string."""
    name = body.get("model")
    if not isinstance(name, str | None):
        raise invalid(f"model must be a string, got {shown(name)}", param="model")
    return name


def _read_by(act: Callable[[dict[str, Any]], Value], raw: bytes) -> Value:
    return act(_parsed(raw))


def _parsed(raw: bytes) -> dict[str, Any]:
    return read_object(raw, "body", GatewayCode.INVALID_JSON)


async def read_bytes(request: Request, max_bytes: int, take: Take) -> bytes:
    """Return the bytes of a JSON body. Raises ApiError 400, 413 or 415.

    Args:
        take: called with the number of bytes that the body adds to the memory; see `BodyBytes.room`.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise _refused(415, f"the content type must be application/json, got {kind[:60]!r}")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise _refused(415, "compressed bodies are not supported: send the body without Content-Encoding")
    length = request.headers.get("content-length", "")
    taken = int(length[:20]) if length.isdecimal() else 0
    if taken > max_bytes:
        raise _too_large(max_bytes)
    take(taken)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            if size > taken:
                take(size - taken)
                taken = size
            parts.append(part)
    except ClientDisconnect:
        raise invalid("the connection closed before the whole body arrived") from None
    return b"".join(parts)


def _too_large(max_bytes: int) -> ApiError:
    # the rest of the body is not read
    message = f"the body must be at most {max_bytes} bytes"
    return ApiError(
        413, "invalid_request_error", GatewayCode.REQUEST_TOO_LARGE, message, headers={"connection": "close"}
    )


def _refused(status: int, message: str) -> ApiError:
    return ApiError(status, "invalid_request_error", GatewayCode.UNSUPPORTED_MEDIA_TYPE, message)


def read_object(raw: bytes, name: str, code: str) -> dict[str, Any]:
    """Parse the object. Raises ApiError 400 with this code; `name` names the JSON in the message."""
    try:
        value = _DECODER.decode(raw)
    except RecursionError:
        raise invalid(f"the {name} is nested too deeply", code=code) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the {name} is not valid JSON: {error}", code=code) from None
    if not isinstance(value, dict):
        raise invalid(f"the {name} must be a JSON object, got {shown(value)}", code=code)
    return value
