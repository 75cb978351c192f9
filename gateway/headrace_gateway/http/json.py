"""JSON responses, encoded as strictly as requests are decoded: objects, errors, pages of lists, and single lines."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace_gateway.errors import ApiError, invalid
from headrace_gateway.http.tei_errors import has_tei_errors, tei_error
from headrace_wire.codes import GatewayCode

_ENCODE: Final = msgspec.json.Encoder().encode
_LINE_ENDS: Final = {character.encode(): b"\\u%04x" % ord(character) for character in "\x85\u2028\u2029"}
"""Line ends of str.splitlines(), with which clients split streams. JSON itself escapes line ends below U+0020."""
_PREFIX: Final = "/v1/messages"
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: GatewayCode.REQUEST_TOO_LARGE,
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Anthropic's error type by status. Any other 4xx is `invalid_request_error`, any other 5xx `api_error`."""
_OVERLOADED: Final = frozenset({GatewayCode.QUEUE_FULL})
"""Codes with status 429 for a limit of the whole queue, not of the caller."""


def is_anthropic(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API."""
    return path == _PREFIX or path.startswith(f"{_PREFIX}/")


def anthropic_error(error: ApiError, request_id: str | None = None) -> tuple[dict[str, Any], int]:
    """Return the body and the status."""
    status = 529 if error.status == 503 or error.code in _OVERLOADED else error.status
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    told = {"type": kind, "message": error.message}
    if error.code == GatewayCode.INSUFFICIENT_QUOTA:  # the type does not tell it from a rate limit
        told["code"] = error.code
    body: dict[str, Any] = {"type": "error", "error": told}
    return (body if request_id is None else {**body, "request_id": request_id}), status


class JsonResponse(Response):
    def __init__(self, body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(_ENCODE(body), status, headers, "application/json")


class ErrorResponse(Response):
    """An error in the format of the API that the request's path belongs to."""

    def __init__(self, error: ApiError) -> None:
        super().__init__()
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, status = self._error.body(), self._error.status
        if has_tei_errors(scope):
            body, status = tei_error(self._error)
        if is_anthropic(scope["path"]):
            body, status = anthropic_error(self._error, scope["state"].get("request_id"))
        await JsonResponse(body, status=status, headers=self._error.headers)(scope, receive, send)


def encode_line(value: Any) -> bytes:
    """Return JSON for server-sent events and JSON Lines. All characters that clients take for line ends are escaped."""
    encoded = _ENCODE(value)
    if not encoded.isascii():
        for character, escape in _LINE_ENDS.items():
            encoded = encoded.replace(character, escape)
    return encoded


def read_integer(text: str, name: str, low: int, high: int) -> int:
    """Parse a number of a query. Raises ApiError 400."""
    if not (text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high):
        raise invalid(f"{name} must be an integer from {low} to {high}, got {text[:20]!r}", param=name)
    return int(text)


def read_limit(query: Mapping[str, str], default: int, most: int) -> int:
    """Parse `limit` of a query. Raises ApiError 400."""
    return read_integer(query["limit"], "limit", 1, most) if "limit" in query else default


def page_of(
    shapes: Sequence[dict[str, Any]], query: Mapping[str, str], what: str, *, default: int, most: int
) -> dict[str, Any]:
    """Return the page of a list that `order`, `after` and `limit` of a query ask for. Raises ApiError 400.

    Args:
        shapes: the whole list, newest first.
        what: the objects of the list, for errors.
    """
    limit = read_limit(query, default, most)
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise invalid(f"order must be asc or desc, got {order[:20]!r}", param="order")
    found = list(shapes) if order == "desc" else list(reversed(shapes))
    if after is not None:
        places = [place for place, shape in enumerate(found) if shape["id"] == after]
        if not places:
            raise invalid(f"after must be the id of {what}, got {after[:80]!r}", param="after")
        found = found[places[0] + 1 :]
    return object_list(found[:limit], has_more=len(found) > limit)


def object_list(shapes: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return one page of a list."""
    ids = [shape["id"] for shape in shapes] or [None]
    return {"object": "list", "data": list(shapes), "first_id": ids[0], "last_id": ids[-1], "has_more": has_more}
