"""Serves the files of the page from memory, with headers that let the browser load nothing else."""

from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_gateway.http.broker_errors import not_found

_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FILES: Final = {
    path.name: path.read_bytes()
    for path in (files("headrace_gateway.page") / "static").iterdir()
    if path.name.endswith(tuple(_TYPES))
}
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # the browser refuses innerHTML and the like
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""The page may call its own gateway, and nothing else."""
_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


async def _file(request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    content = _FILES.get(name)
    if content is None:
        raise not_found(f"no page file {name[:100]!r}")
    return Response(content, media_type=_TYPES["." + name.rpartition(".")[2]], headers=_HEADERS)


routes: Final = [Route("/", _file), Route("/page/{name}", _file)]
"""Routes that need no key: the files contain no secrets."""
