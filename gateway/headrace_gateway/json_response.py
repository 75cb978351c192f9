"""A JSON response, encoded as strictly as requests are decoded."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace_gateway.anthropic_errors import anthropic_error, is_anthropic
from headrace_gateway.errors import ApiError

_ENCODE: Final = msgspec.json.Encoder().encode


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
        if is_anthropic(scope["path"]):
            body, status = anthropic_error(self._error, scope["state"].get("request_id"))
        await JsonResponse(body, status=status, headers=self._error.headers)(scope, receive, send)
