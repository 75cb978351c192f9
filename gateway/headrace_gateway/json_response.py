"""A JSON answer, written as strictly as requests are read."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.responses import Response

from headrace_gateway.errors import ApiError

_ENCODE: Final = msgspec.json.Encoder().encode


class JsonResponse(Response):
    def __init__(self, body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(_ENCODE(body), status, headers, "application/json")


def error_response(error: ApiError) -> JsonResponse:
    return JsonResponse(error.body(), status=error.status, headers=error.headers)
