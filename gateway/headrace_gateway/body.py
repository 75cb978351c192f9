"""Reads a request's body: limited in size, strict JSON, an object at the top."""

from typing import Any

from starlette.requests import ClientDisconnect, Request

from headrace_gateway.errors import ApiError, invalid
from headrace_gateway.json_object import read_object


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """Return the body as a dict. Raises ApiError 400, 413 or 415."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise _refused(415, f"the content type must be application/json, not {kind[:60]!r}")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise _refused(415, "compressed bodies are not supported: send the body without Content-Encoding")
    return read_object(await _read(request, max_bytes), "body", "invalid_json")


async def _read(request: Request, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            parts.append(part)
    except ClientDisconnect:
        raise invalid("the connection closed before the whole body arrived") from None
    return b"".join(parts)


def _too_large(max_bytes: int) -> ApiError:
    # the rest of the body is not read
    message = f"the body must be at most {max_bytes} bytes"
    return ApiError(413, "invalid_request_error", "request_too_large", message, headers={"connection": "close"})


def _refused(status: int, message: str) -> ApiError:
    return ApiError(status, "invalid_request_error", "unsupported_media_type", message)
