"""The ASGI application: its routes, its middleware, and the resources that live as long as the server."""

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final

import structlog
from redis.exceptions import ResponseError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

import headrace_broker.client.message_sender  # noqa: F401  # imports Celery now, or the first request would wait for it
from headrace_broker import AsyncClient, BrokerSettings, HeadraceBrokerError
from headrace_broker.client.tokenizer_calls import TokenizerClient
from headrace_broker.server.connections import REDIS_ERRORS, connect_async
from headrace_broker.server.stream_servers import AsyncStreamServers
from headrace_broker.streams.hub import StreamHub
from headrace_gateway.answers.envelope import EnvelopeStore
from headrace_gateway.answers.response_store import ResponseStore
from headrace_gateway.anthropic import endpoints as anthropic_endpoints
from headrace_gateway.background_task import keep_running, running
from headrace_gateway.batch import endpoints as batches_endpoint
from headrace_gateway.batch.runner import running_batches
from headrace_gateway.batch.store import BatchStore
from headrace_gateway.chat import endpoints as chat_endpoints
from headrace_gateway.completions import endpoints as completions_endpoints
from headrace_gateway.context import Gateway
from headrace_gateway.decisions import endpoints as decision_endpoints
from headrace_gateway.errors import ApiError
from headrace_gateway.files import endpoints as files_endpoint
from headrace_gateway.files.stored_files import StoredFiles
from headrace_gateway.http import probes
from headrace_gateway.http.broker_errors import api_error_of, unavailable
from headrace_gateway.http.json import ErrorResponse
from headrace_gateway.http.local_guard import LocalGuard
from headrace_gateway.http.request_log import RequestLog
from headrace_gateway.keys.authentication import Authentication
from headrace_gateway.keys.key_file import KeyFile
from headrace_gateway.keys.limits import RateLimits
from headrace_gateway.keys.model_catalog import ModelCatalog
from headrace_gateway.models import endpoints as models_endpoint
from headrace_gateway.models import tokenizers
from headrace_gateway.openapi import document
from headrace_gateway.page import files as page_files
from headrace_gateway.page import overview
from headrace_gateway.pooling import endpoints as pooling_endpoints
from headrace_gateway.redis.claims import Claims
from headrace_gateway.redis.watch import RedisWatch
from headrace_gateway.responses import endpoints as responses
from headrace_gateway.responses.collector import ResponseCollector
from headrace_gateway.settings import GatewaySettings
from headrace_gateway.usage import endpoints as usage_endpoints
from headrace_gateway.watched_file import WatchedFile
from headrace_gateway.webhooks.endpoint_file import read_endpoints
from headrace_gateway.webhooks.event_publisher import EndpointFile, Webhooks
from headrace_monitoring.gateway_metrics import GatewayMetrics
from headrace_wire.codes import GatewayCode

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)

_THREADS: Final = 32
"""kombu publishes in threads. asyncio's default pool is small and shared by everything."""
_EXPOSED: Final = (
    "x-request-id",
    "request-id",
    "x-client-request-id",
    "x-headrace-id",
    "x-headrace-queued-ms",
    "x-headrace-ignored",
    "x-headrace-truncated",
    "openai-processing-ms",
    "retry-after",
    "x-should-retry",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)
"""Response headers that a page of another origin may read."""


_PUBLIC: Final = (*probes.routes, *page_files.routes)
"""Routes that need no key."""
_ROUTES: Final = (
    *_PUBLIC,
    *chat_endpoints.routes,
    *completions_endpoints.routes,
    *anthropic_endpoints.routes,
    *pooling_endpoints.routes,
    *decision_endpoints.routes,
    *tokenizers.routes,  # before the route of a response's id, which would match their path
    *responses.refused,
    *responses.routes,
    *models_endpoint.routes,
    *files_endpoint.routes,
    *batches_endpoint.routes,
    *usage_endpoints.routes,
    *overview.routes,
    *document.routes,
)


def make_app(
    settings: GatewaySettings, *, metrics: GatewayMetrics | None = None, watch: RedisWatch | None = None
) -> Starlette:
    """Make the application. Its connections open when the server starts it and close when the server stops.

    The queue's own settings, such as HEADRACE_MAX_QUEUED_REQUESTS, are read from the environment.

    Raises GatewaySettingsError if the key file or the webhook file cannot be used, SettingsError for an invalid setting
    of the queue.
    """
    broker = BrokerSettings.from_env({**os.environ, "HEADRACE_REDIS_URL": settings.redis_url})
    metrics = GatewayMetrics() if metrics is None else metrics
    watch = RedisWatch(metrics) if watch is None else watch
    key_file = None
    if settings.keys is not None:
        key_file = KeyFile(settings.keys, when_read=lambda valid: metrics.key_file_read(valid=valid))
    webhook_file = None
    if settings.webhooks is not None:
        webhook_file = WatchedFile(
            "webhook file",
            settings.webhooks,
            read_endpoints,
            when_read=lambda valid: metrics.webhook_file_read(valid=valid),
        )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with _open_gateway(app, settings, broker, metrics, watch, webhook_file) as app.state.gateway:
            yield

    app = Starlette(
        routes=_ROUTES,
        middleware=_middleware(settings, metrics, key_file),
        exception_handlers={
            ApiError: _on_api_error,
            HeadraceBrokerError: _on_broker_error,
            HTTPException: _on_http_exception,
            **dict.fromkeys(REDIS_ERRORS, _on_redis_error),
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a redirect would lose the body of a POST in some clients
    app.state.redis_watch = watch
    return app


def _middleware(settings: GatewaySettings, metrics: GatewayMetrics, key_file: KeyFile | None) -> list[Middleware]:
    """Return the middleware, the outermost first."""
    middleware = [Middleware(RequestLog, metrics=metrics)]
    if settings.allow_origin:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allow_origin,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),  # OpenAI's SDKs send headers of their own, and new ones with each release
                expose_headers=_EXPOSED,
            )
        )
    if key_file is None:
        middleware.append(Middleware(LocalGuard, settings.allow_origin))
    return [*middleware, Middleware(Authentication, key_file=key_file, public=_PUBLIC)]


@asynccontextmanager
async def _open_gateway(
    app: Starlette,
    settings: GatewaySettings,
    broker: BrokerSettings,
    metrics: GatewayMetrics,
    watch: RedisWatch,
    webhook_file: EndpointFile | None,
) -> AsyncIterator[Gateway]:
    """Open the connections, and run the background tasks while the block runs."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "gateway"))
    redis = connect_async(settings.redis_url)
    streams = AsyncStreamServers.connected(redis, *broker.stream_servers)
    reading = connect_async(settings.redis_url)  # a connection pool of its own: readers block in these connections
    read = AsyncStreamServers.connected(reading, *broker.stream_servers)
    hub = StreamHub(read)
    async with AsyncClient(broker) as client:
        envelopes = EnvelopeStore(redis, broker.result_ttl_seconds)
        open_responses = Claims(redis, "responses")
        stored = ResponseStore(redis, streams, envelopes, open_responses, settings.store_life)
        webhooks = Webhooks(redis, webhook_file, metrics)
        longest = broker.result_ttl_seconds / 4
        collector = ResponseCollector(
            redis, streams, open_responses, envelopes, stored, metrics, webhooks.publish, longest=longest
        )
        app.state.files = None if settings.files is None else StoredFiles(settings.files)
        app.state.batches = BatchStore(redis, streams)
        gateway = Gateway(
            settings,
            client,
            redis,
            streams,
            ModelCatalog(client),
            envelopes,
            hub,
            metrics,
            RateLimits(redis),
            stored,
            TokenizerClient(redis),
            webhooks,
        )
        try:
            async with (
                watch.watching(redis),
                webhooks.running(),
                running(keep_running(collector.run), keep_running(gateway.read.run)),
                running_batches(gateway, app.state.files, app.state.batches),
            ):
                yield gateway
        finally:
            await gateway.limits.aclose()
            await gateway.bodies.aclose()
            await hub.aclose()
            await read.aclose()
            await reading.aclose()
            await streams.aclose()
            await redis.aclose()


def _answer(request: Request, error: ApiError) -> Response:
    request.scope["state"]["refusal"] = error.code
    return ErrorResponse(error)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _answer(request, error)


async def _on_broker_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadraceBrokerError)
    return _answer(request, api_error_of(error))


async def _on_redis_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ResponseError):  # Redis answers, so `RedisWatch` may not know of the problem
        logger.error("Redis refused a command", reason=str(error))
    return _answer(request, unavailable())


def _methods_at(request: Request) -> set[str]:
    """Return the methods of all routes of the path. Starlette reports those of the first route only."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    path = next((route.path for route in routes if route.matches(request.scope)[0] is not Match.NONE), None)
    return {method for route in routes if route.path == path for method in route.methods or ()}


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 405:
        message = f"{path} does not allow {request.method[:16]}"
        headers = {"allow": ", ".join(sorted(_methods_at(request)))}
        return _answer(
            request, ApiError(405, "invalid_request_error", GatewayCode.METHOD_NOT_ALLOWED, message, headers=headers)
        )
    message = f"no endpoint at {path}"
    return _answer(request, ApiError(404, "invalid_request_error", GatewayCode.NOT_FOUND, message))
