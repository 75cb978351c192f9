"""A gateway whose outputs a test writes, so that it says when each token comes; everything but generation is real.

It speaks the event streams of `/v1/chat/completions`.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace_broker import AsyncClient, BrokerSettings
from headrace_broker.client.tokenizer_calls import TokenizerClient
from headrace_broker.server.connections import connect_async
from headrace_broker.server.stream_servers import AsyncStreamServers
from headrace_broker.streams.hub import StreamHub
from headrace_gateway import GatewaySettings
from headrace_gateway.answers.envelope import Envelope, EnvelopeStore
from headrace_gateway.answers.response_store import ResponseStore
from headrace_gateway.context import Gateway, gateway_of
from headrace_gateway.errors import ApiError
from headrace_gateway.http.json import ErrorResponse, JsonResponse
from headrace_gateway.http.local_guard import LocalGuard
from headrace_gateway.keys.api_key import ANYONE, ApiKey
from headrace_gateway.keys.limits import RateLimits
from headrace_gateway.keys.model_catalog import ModelCatalog
from headrace_gateway.page import files as page_files
from headrace_gateway.page import overview
from headrace_gateway.redis.claims import Claims
from headrace_gateway.requests.call import ChatOptions
from headrace_gateway.webhooks.event_publisher import Webhooks
from headrace_monitoring.gateway_metrics import GatewayMetrics

ID = "chatcmpl-0123456789abcdef0123456789abcdef"
MODEL = "tiny"


@dataclass
class Script:
    """The model's output, token by token, and how many tokens it may emit by now."""

    tokens: Sequence[str | dict[str, Any]] = ("The ", "sky ", "is ", "blue.")
    """Texts, or whole deltas."""
    allowed: int = 10**6
    is_held: bool = False
    """Whether the status of the response has to wait, as in a queue."""
    has_id: bool = True
    """Whether the response has the header with its id."""
    error: str | None = None
    """The error after the last token, in place of an end."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the requests."""
    urls: list[str] = field(default_factory=list)
    models: Sequence[str] = (MODEL,)
    fields: dict[str, Any] = field(default_factory=lambda: {"max_model_len": 2048})
    """Further fields of each model."""

    def usage(self, count: int) -> dict[str, Any]:
        return {
            "prompt_tokens": 7,
            "completion_tokens": count,
            "total_tokens": 7 + count,
            "prompt_tokens_details": {"cached_tokens": 4},
        }

    async def frames(self) -> AsyncIterator[bytes]:
        """Return the events; the first one has the role."""

        def frame(choices: list[dict[str, Any]], count: int) -> bytes:
            chunk = {"id": ID, "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": choices}
            return b"data: " + msgspec.json.encode({**chunk, "usage": self.usage(count)}) + b"\n\n"

        yield frame([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}], 0)
        tokens = self.tokens
        for number, token in enumerate(tokens, 1):
            while number > self.allowed:
                await asyncio.sleep(0.01)
            delta = token if isinstance(token, dict) else {"content": token}
            choice = {"index": 0, "delta": delta, "finish_reason": None, "token_ids": [number - 1]}
            yield frame([choice], number)
        if self.error is not None:
            yield b"data: " + msgspec.json.encode({"error": {"message": self.error}}) + b"\n\n"
        else:
            count = len(tokens)
            yield frame([{"index": 0, "delta": {}, "finish_reason": "stop"}], count)
            yield frame([], count)
        yield b"data: [DONE]\n\n"


class ScriptedGateway:
    """A gateway on a port of its own. Only `keys` are accepted; without any, every caller."""

    def __init__(self, script: Script, redis_url: str, port: int, *, keys: dict[str, ApiKey] | None = None) -> None:
        self.script = script
        self.url = f"http://127.0.0.1:{port}"
        self._keys = keys
        self._settings = GatewaySettings(redis_url=redis_url, port=port)
        config = uvicorn.Config(self._app(), port=port, log_level="warning", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> "ScriptedGateway":
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the server ended"
            self._thread.join(0.01)
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)

    def _app(self) -> ASGIApp:
        settings = self._settings

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            redis = connect_async(settings.redis_url)
            streams, metrics = AsyncStreamServers(redis, {}, 600), GatewayMetrics()
            async with AsyncClient(BrokerSettings(redis_url=settings.redis_url)) as client:
                hub, envelopes = StreamHub(redis), EnvelopeStore(redis, 600)
                app.state.gateway = Gateway(
                    settings,
                    client,
                    redis,
                    streams,
                    ModelCatalog(client),
                    envelopes,
                    hub,
                    metrics,
                    RateLimits(redis),
                    ResponseStore(redis, streams, envelopes, Claims(redis, "responses"), settings.store_life),
                    TokenizerClient(redis),
                    Webhooks(redis, None, metrics),
                )
                yield
                await hub.aclose()
                await redis.aclose()

        routes = [
            *page_files.routes,
            *overview.routes,
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._create, methods=["POST"]),
        ]
        app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={ApiError: _told})
        authenticated = _Authentication(app, self._keys, self.script)
        return LocalGuard(authenticated, ()) if self._keys is None else authenticated

    async def _models(self, _request: Request) -> Response:
        about = {"object": "model", "created": 1, "owned_by": "headrace", **self.script.fields}
        models = [{"id": name, **about} for name in self.script.models]
        return JsonResponse({"object": "list", "data": models})

    async def _create(self, request: Request) -> Response:
        self.script.bodies.append(msgspec.json.decode(await request.body()))
        key: ApiKey = request.scope["state"]["key"]
        envelope = Envelope(
            id=ID,
            request_ids=(ID,),
            created=1,
            model=MODEL,
            key=key.name,
            tenant=key.tenant,
            options=ChatOptions(),
            expires=600,
        )
        await gateway_of(request).envelopes.put(envelope)
        while self.script.is_held:
            await asyncio.sleep(0.01)
        headers = {"x-headrace-queued-ms": "1234", **({"x-headrace-id": ID} if self.script.has_id else {})}
        return StreamingResponse(self.script.frames(), media_type="text/event-stream", headers=headers)


class _Authentication:
    def __init__(self, app: ASGIApp, keys: dict[str, ApiKey] | None, script: Script) -> None:
        self._app, self._keys, self._script = app, keys, script

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            self._script.urls.append(str(request.url))
            is_open = request.method == "OPTIONS" or scope["path"] == "/" or scope["path"].startswith("/page/")
            presented = request.headers.get("authorization", "").removeprefix("Bearer ")
            key = ANYONE if self._keys is None or is_open else self._keys.get(presented)
            if key is None:
                error = ApiError(401, "authentication_error", "invalid_api_key", "the API key is wrong")
                await ErrorResponse(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["key"] = key
        await self._app(scope, receive, send)


async def _told(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return ErrorResponse(error)
