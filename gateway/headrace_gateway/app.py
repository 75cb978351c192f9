"""The ASGI application: routes, what wraps them, and what lives as long as the server."""

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace_broker import AsyncClient, BrokerSettings, HeadraceBrokerError
from headrace_broker.connections import REDIS_ERRORS, connect_async
from headrace_broker.stream_hub import StreamHub
from headrace_gateway import generation, models_endpoint, overview, page_files
from headrace_gateway.broker_errors import api_error_of, unavailable
from headrace_gateway.context import Gateway, gateway_of
from headrace_gateway.envelope import EnvelopeStore
from headrace_gateway.errors import ApiError
from headrace_gateway.json_response import error_response
from headrace_gateway.keys import ANYONE
from headrace_gateway.local_guard import LocalGuard
from headrace_gateway.model_catalog import ModelCatalog
from headrace_gateway.settings import GatewaySettings

_THREADS: Final = 32
"""kombu publishes in threads; asyncio's own pool has a few for everything."""

logger = logging.getLogger(__name__)


def make_app(settings: GatewaySettings) -> Starlette:
    """Make the application; its connections open when the server starts it and close with it."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "gateway"))
        broker = BrokerSettings(redis_url=settings.redis_url)
        redis = connect_async(settings.redis_url)
        hub = StreamHub(redis)
        async with AsyncClient(broker) as client:
            envelopes = EnvelopeStore(redis, broker.result_ttl_seconds)
            app.state.gateway = Gateway(settings, client, redis, ModelCatalog(client), envelopes, hub)
            try:
                yield
            finally:
                await hub.aclose()
                await redis.aclose()

    return Starlette(
        routes=[
            Route("/health", _health),
            Route("/ready", _ready),
            *generation.routes,
            *models_endpoint.routes,
            *overview.routes,
            *page_files.routes,
        ],
        middleware=[Middleware(LocalGuard, settings.allowed_origins), Middleware(EverybodyIsAnyone)],
        exception_handlers={
            ApiError: _on_api_error,
            HeadraceBrokerError: _on_broker_error,
            HTTPException: _on_http_exception,
            **dict.fromkeys(REDIS_ERRORS, _on_redis_error),
        },
        lifespan=lifespan,
    )


async def _health(_request: Request) -> Response:
    return PlainTextResponse("ok")


async def _ready(request: Request) -> Response:
    await gateway_of(request).redis.ping()
    return PlainTextResponse("ready")


async def _on_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_broker_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadraceBrokerError)
    return error_response(api_error_of(error))


async def _on_redis_error(_request: Request, _error: Exception) -> Response:
    return error_response(unavailable())


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        message = f"{request.url.path[:200]} does not take {request.method}"
        return error_response(ApiError(405, "invalid_request_error", "method_not_allowed", message))
    message = f"there is nothing at {request.url.path[:200]}"
    return error_response(ApiError(404, "invalid_request_error", "not_found", message))


class EverybodyIsAnyone:
    """Authentication of a gateway without keys."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["key"] = ANYONE
        await self._app(scope, receive, send)
