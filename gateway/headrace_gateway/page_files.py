"""Serves the files of the page from memory, with headers that let the browser load nothing else."""

import re
from collections.abc import Iterable
from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_gateway.broker_errors import not_found
from headrace_gateway.context import gateway_of

_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FILES: Final = {
    path.name: path.read_bytes()
    for path in (files("headrace_gateway") / "page").iterdir()
    if path.name.endswith(tuple(_TYPES))
}
_HEADERS: Final = {
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_ORIGIN: Final = re.compile(r"https?://[a-z0-9.:\[\]-]+", re.IGNORECASE)


def content_security_policy(allowed_origins: Iterable[str]) -> str:
    """Allow the page to call this gateway, and the allowed origins, since replicas have the same settings."""
    allowed = [origin for origin in allowed_origins if _ORIGIN.fullmatch(origin)]
    others = ["http:", "https:"] if "*" in allowed_origins else allowed
    return "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            " ".join(("connect-src 'self'", *others)),
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            # the browser refuses innerHTML and the like
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


async def _file(request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    content = _FILES.get(name)
    if content is None:
        raise not_found(f"no page file {name[:100]!r}")
    policy = content_security_policy(gateway_of(request).settings.allowed_origins)
    headers = {**_HEADERS, "Content-Security-Policy": policy}
    return Response(content, media_type=_TYPES["." + name.rpartition(".")[2]], headers=headers)


routes: Final = [Route("/", _file), Route("/page/{name}", _file)]
"""They need no key, as they contain no secrets."""
