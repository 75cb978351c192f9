"""`Authentication`: identifies the caller by the API key, for every endpoint but the public ones."""

from collections.abc import Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace_gateway.errors import ApiError
from headrace_gateway.json_response import ErrorResponse
from headrace_gateway.key_file import KeyFile
from headrace_gateway.keys import ANYONE


class Authentication:
    """ASGI middleware that puts the caller's ApiKey into `scope["state"]["key"]`, or answers 401.

    Args:
        key_file: None: every caller is ANYONE.
        public: routes that need no key.
    """

    def __init__(self, app: ASGIApp, key_file: KeyFile | None, public: Sequence[Route]) -> None:
        self._app: Final = app
        self._key_file: Final = key_file
        self._public: Final = tuple(public)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._authenticate(scope)
            except ApiError as error:
                scope["state"]["refusal"] = error.code
                await ErrorResponse(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _authenticate(self, scope: Scope) -> None:
        state = scope.setdefault("state", {})
        if self._key_file is None:
            state["key"] = ANYONE
            return
        presented = _presented(Headers(scope=scope))
        key = None if presented is None else self._key_file.find(presented)
        if key is not None:
            state["key"] = key
        elif not self._is_public(scope):
            if presented is None:
                message = "no API key was sent: send it as 'Authorization: Bearer KEY'"
            else:
                message = "the API key is unknown to this gateway"
            headers = {"www-authenticate": "Bearer"}
            raise ApiError(401, "authentication_error", "invalid_api_key", message, headers=headers)

    def _is_public(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] == Match.FULL for route in self._public)


def _presented(headers: Headers) -> bytes | None:
    """Return the bytes of the key. `Authorization: Bearer` takes precedence over Anthropic's `x-api-key`."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = headers.get("x-api-key", "")
    return key.strip().encode("latin-1") or None
