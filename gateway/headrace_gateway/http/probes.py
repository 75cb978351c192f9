"""`/health` and `/ready`: probes for orchestrators and load balancers. They need no key."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_gateway.http.json import JsonResponse


async def health(_request: Request) -> Response:
    """Answer 200: the process is alive."""
    return JsonResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """Answer 200 if requests can be served; 503 while Redis is unavailable, and while no model is registered."""
    problem = request.app.state.redis_watch.not_ready()
    if problem is None:
        return JsonResponse({"status": "ok"})
    return JsonResponse({"status": "unavailable", "reason": problem}, status=503, headers={"retry-after": "1"})


routes: Final = [Route("/health", health), Route("/ready", ready)]
