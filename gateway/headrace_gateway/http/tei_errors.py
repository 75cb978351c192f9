"""Errors in the format of Hugging Face's text-embeddings-inference (TEI)."""

from typing import Any, Final

from starlette.types import Scope

from headrace_gateway.errors import ApiError
from headrace_wire.codes import ErrorCode

_PATHS: Final = ("/embed", "/predict")
_STATUS: Final = {500: 424, 504: 424}
"""TEI answers 424 if the model failed."""
_TYPES: Final = {413: "validation", 422: "validation", 424: "backend", 429: "overloaded", 503: "unhealthy"}


def has_tei_errors(scope: Scope) -> bool:
    """Return whether the errors of a request have TEI's format: by its path, or by the fields of its body."""
    return scope["path"] in _PATHS or bool(scope["state"].get("is_tei"))


def tei_error(error: ApiError) -> tuple[dict[str, Any], int]:
    """Return the body and the status."""
    status = _STATUS.get(error.status, error.status)
    kind = _TYPES.get(status, "validation")
    if status == 400:
        if error.code == ErrorCode.UNSUPPORTED:
            status, kind = 424, "backend"
        elif "must not be empty" in error.message:
            kind = "empty"
        else:
            is_long = error.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED or "must hold 1 to" in error.message
            status = 413 if is_long else 422
    return {"error": error.message, "error_type": kind}, status
