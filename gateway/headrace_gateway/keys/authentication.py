"""`Authentication`: identifies the caller by the API key, for every endpoint but the public ones."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

from starlette.datastructures import Headers
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_gateway.errors import ApiError
from headrace_gateway.http.json import ErrorResponse
from headrace_gateway.keys.api_key import ANYONE
from headrace_gateway.keys.key_file import KeyFile
from headrace_wire.codes import GatewayCode

_CHECK_SECONDS: Final = 5.0
"""Seconds without a message from the client after which its key is looked up again."""


class Authentication:
    """ASGI middleware that puts the caller's ApiKey into `scope["state"]["key"]`, or answers 401.

    When a key is removed from the file, its open answers end, as if their clients had disconnected.

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
            if self._key_file is not None and "key" in scope["state"]:
                receive = partial(self._receive, receive, scope)
        await self._app(scope, receive, send)

    async def _receive(self, receive: Receive, scope: Scope) -> Message:
        """Return the client's next message; a disconnection if its key is no longer valid."""
        assert self._key_file is not None
        presented = _presented(Headers(scope=scope)) or b""
        waiting = asyncio.ensure_future(receive())
        try:
            while not (await asyncio.wait({waiting}, timeout=_CHECK_SECONDS))[0]:
                if self._key_file.find(presented) is None:
                    return {"type": "http.disconnect"}
            return await waiting
        finally:
            waiting.cancel()

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
            raise ApiError(401, "authentication_error", GatewayCode.INVALID_API_KEY, message, headers=headers)

    def _is_public(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] == Match.FULL for route in self._public)


def _presented(headers: Headers) -> bytes | None:
    """Return the bytes of the key. `Authorization: Bearer` takes precedence over Anthropic's `x-api-key`."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = headers.get("x-api-key", "")
    return key.strip().encode("latin-1") or None
