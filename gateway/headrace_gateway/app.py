"""The ASGI application: routes, what wraps them, and what lives as long as the server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from headrace_broker import AsyncClient, BrokerSettings
from headrace_broker.connections import connect_async
from headrace_gateway.context import Gateway
from headrace_gateway.model_catalog import ModelCatalog
from headrace_gateway.settings import GatewaySettings


def make_app(settings: GatewaySettings) -> Starlette:
    """Make the application; its connections open when the server starts it and close with it."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        redis = connect_async(settings.redis_url)
        async with AsyncClient(BrokerSettings(redis_url=settings.redis_url)) as client:
            app.state.gateway = Gateway(settings, client, redis, ModelCatalog(client))
            try:
                yield
            finally:
                await redis.aclose()

    return Starlette(routes=[Route("/health", _health)], lifespan=lifespan)


async def _health(_request: object) -> PlainTextResponse:
    return PlainTextResponse("ok")
