"""Maps the queue's errors to HTTP: status, OpenAI's type, code, and whether a client should retry."""

import math
from collections.abc import Mapping
from typing import Final

from headrace_broker import (
    HeadraceBrokerError,
    InvalidRequestError,
    QueueFullError,
    QueueUnavailableError,
    StreamExpiredError,
    TenantQueueFullError,
    UnknownModelError,
)
from headrace_broker.errors import TooManySubscribersError
from headrace_gateway.errors import ApiError
from headrace_wire.codes import ErrorCode, GatewayCode

NO_RETRY: Final = {"x-should-retry": "false"}
"""OpenAI's SDKs retry a status of 500 and above; the queue has already retried these."""

REFUSALS: Final = (ApiError, InvalidRequestError, UnknownModelError, QueueFullError)
"""Errors of a send after which the request is not in the queue. After any other one it may be there."""

_ENDS: Final[Mapping[str, tuple[int, str, dict[str, str]]]] = {
    ErrorCode.INVALID_REQUEST: (400, "invalid_request_error", {}),
    ErrorCode.UNSUPPORTED: (400, "invalid_request_error", {}),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: (400, "invalid_request_error", {}),
    ErrorCode.MODEL_NOT_FOUND: (404, "invalid_request_error", {}),
    ErrorCode.QUOTA_EXCEEDED: (429, "rate_limit_error", {"retry-after": "1"}),
    ErrorCode.CANCELLED: (499, "invalid_request_error", {}),
    ErrorCode.EXPIRED: (504, "server_error", NO_RETRY),
}
_PARAMS: Final[Mapping[str, str]] = {ErrorCode.MODEL_NOT_FOUND: "model"}


def api_error_of_end(code: str, message: str, *, prompt_field: str | None = None) -> ApiError:
    """Translate the error of an EndEvent. A code that this release does not know becomes a server error.

    Args:
        prompt_field: the field that holds the prompt, for an error about the length of the context.
    """
    status, kind, headers = _ENDS.get(code, (500, "server_error", NO_RETRY))
    param = prompt_field if code == ErrorCode.CONTEXT_LENGTH_EXCEEDED else _PARAMS.get(code)
    return ApiError(status, kind, code, message, param=param, headers=headers)


def api_error_of(error: HeadraceBrokerError) -> ApiError:
    """Translate an error of the queue's client."""
    if isinstance(error, InvalidRequestError) and any("was used with another" in each for each in error.problems):
        message = "the Idempotency-Key was used with another request: choose a new key"
        return ApiError(422, "invalid_request_error", GatewayCode.IDEMPOTENCY_KEY_REUSED, message)
    if isinstance(error, InvalidRequestError):
        return ApiError(400, "invalid_request_error", error.code, str(error))
    if isinstance(error, UnknownModelError):
        return ApiError(404, "invalid_request_error", ErrorCode.MODEL_NOT_FOUND, str(error), param="model")
    if isinstance(error, QueueFullError):
        seconds = 1 if error.retry_after_seconds is None else max(1, math.ceil(error.retry_after_seconds))
        code = ErrorCode.QUOTA_EXCEEDED if isinstance(error, TenantQueueFullError) else GatewayCode.QUEUE_FULL
        return ApiError(429, "rate_limit_error", code, str(error), headers={"retry-after": str(seconds)})
    if isinstance(error, StreamExpiredError):
        return not_found("the answer has expired")
    if isinstance(error, TooManySubscribersError):
        return ApiError(429, "rate_limit_error", GatewayCode.TOO_MANY_READERS, str(error), headers={"retry-after": "1"})
    if isinstance(error, QueueUnavailableError):
        return unavailable()
    return ApiError(500, "server_error", GatewayCode.INTERNAL_ERROR, "internal error; see the log for this request id")


def unavailable() -> ApiError:
    """Return the error of an unavailable queue. The address of Redis is in the log only."""
    message = "the queue is unavailable; try again"
    return ApiError(503, "server_error", GatewayCode.QUEUE_UNAVAILABLE, message, headers={"retry-after": "1"})


def unknown_model(name: str) -> ApiError:
    message = f"the model {name[:64]!r} does not exist, or this key may not use it"
    return ApiError(404, "invalid_request_error", ErrorCode.MODEL_NOT_FOUND, message, param="model")


def not_found(message: str) -> ApiError:
    return ApiError(404, "invalid_request_error", GatewayCode.NOT_FOUND, message)
