"""`LocalGuard`: protects a gateway without API keys from other web sites.

Such a gateway listens on loopback, which every page in a browser on this machine can reach. Two attacks are possible: a
page of another origin posts to the gateway, or makes its own host name resolve to 127.0.0.1 (DNS rebinding).
"""

import ipaddress
import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace_gateway.errors import ApiError
from headrace_gateway.http.json import ErrorResponse
from headrace_wire.codes import GatewayCode

_HOST: Final = re.compile(r"(localhost|[0-9.]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")


class LocalGuard:
    """ASGI middleware that answers 403 or 415 to requests that only a page of another origin sends.

    Args:
        app: the protected application.
        allowed_origins: origins whose pages may call, such as `http://127.0.0.1:8001`; `*`: all. Their hosts are also
            accepted in the Host header.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Iterable[str] = ()) -> None:
        self._app: Final = app
        self._origins: Final = frozenset(origin.lower() for origin in allowed_origins)
        self._hosts: Final = frozenset(urlsplit(origin).netloc for origin in self._origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and "*" not in self._origins:
            refusal = self._refusal(scope["method"], scope["path"], Headers(scope=scope))
            if refusal is not None:
                scope.setdefault("state", {})["refusal"] = refusal.code
                await ErrorResponse(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, method: str, path: str, headers: Headers) -> ApiError | None:
        host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
        # every browser sends the Host header
        if host and host not in self._hosts and not _is_loopback(host):
            message = (
                f"the gateway has no API keys and accepts only names of this machine as Host, got {host[:100]!r}; "
                "start it with --keys, or allow the origin with --allow-origin"
            )
            return ApiError(403, "permission_error", GatewayCode.HOST_NOT_ALLOWED, message)
        if origin and origin not in self._origins and origin != f"http://{host}":
            message = (
                f"the gateway has no API keys and accepts only its own origin, got {origin[:100]!r}; "
                "start it with --keys, or allow the origin with --allow-origin"
            )
            return ApiError(403, "permission_error", GatewayCode.ORIGIN_NOT_ALLOWED, message)
        # a page can post the other types to any origin without a preflight request
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        is_allowed = kind == "application/json" or self._is_own_upload(path, kind, headers) or _is_own_command(headers)
        if method == "POST" and not is_allowed:
            message = f"Content-Type must be application/json, got {kind[:100]!r}"
            return ApiError(415, "invalid_request_error", GatewayCode.UNSUPPORTED_MEDIA_TYPE, message)
        return None

    def _is_own_upload(self, path: str, kind: str, headers: Headers) -> bool:
        """Return whether a form is an upload from our own page, an allowed origin, or a program that is no browser."""
        is_upload = path == "/v1/files" and kind == "multipart/form-data"
        is_own = headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        return is_upload and (is_own or headers.get("origin", "").lower() in self._origins)


def _is_own_command(headers: Headers) -> bool:
    """Return whether a request without a body comes from our own page or an SDK. SDKs cancel with such requests."""
    is_empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
    is_own = headers.get("sec-fetch-site", "none") in ("none", "same-origin")
    return is_empty and is_own and "content-type" not in headers


def _is_loopback(host: str) -> bool:
    """Return whether a Host header names this machine: `localhost` or a loopback address, with any port."""
    found = _HOST.fullmatch(host)
    if not found:
        return False
    try:
        return found[1] == "localhost" or ipaddress.ip_address(found[1].strip("[]")).is_loopback
    except ValueError:
        return False
