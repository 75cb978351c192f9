"""Errors in the format of Anthropic's API, with its statuses."""

from typing import Any, Final

from headrace_gateway.errors import ApiError

_PREFIX: Final = "/v1/messages"
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Anthropic's error type by status. Any other 4xx is `invalid_request_error`, any other 5xx `api_error`."""
_OVERLOADED: Final = frozenset({"queue_full"})
"""Codes with status 429 for a limit of the whole queue, not of the caller."""


def is_anthropic(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API."""
    return path == _PREFIX or path.startswith(f"{_PREFIX}/")


def anthropic_error(error: ApiError, request_id: str | None = None) -> tuple[dict[str, Any], int]:
    """Return the body and the status."""
    status = 529 if error.status == 503 or error.code in _OVERLOADED else error.status
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": error.message}}
    return (body if request_id is None else {**body, "request_id": request_id}), status
