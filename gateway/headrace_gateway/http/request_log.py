"""`RequestLog`: the outermost middleware. It sets ids and times, records metrics, logs one line, and catches errors.

Since it is outermost, the responses of all other middleware carry its headers, too.
"""

import asyncio
import re
import time
import uuid
from typing import Any, Final

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_gateway.errors import ApiError
from headrace_gateway.http.json import ErrorResponse
from headrace_monitoring.gateway_metrics import GatewayMetrics
from headrace_monitoring.labels import Endpoint
from headrace_monitoring.logging import frames
from headrace_wire.codes import GatewayCode

_CLIENT_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_PREFIXES: Final[tuple[tuple[str, Endpoint], ...]] = (
    ("/v1/chat/completions", "chat_completions"),
    ("/v1/completions", "completions"),
    ("/v1/messages", "messages"),
    ("/v1/responses", "responses"),
    ("/embed", "embeddings"),  # also /embeddings
    ("/v1/embed", "embeddings"),  # also /v1/embeddings
    ("/v2/embed", "embeddings"),
    *((f"{prefix}/rerank", "rerank") for prefix in ("", "/v1", "/v2")),
    *((f"{prefix}/score", "score") for prefix in ("", "/v1")),
    *((f"{prefix}/classify", "classify") for prefix in ("", "/v1")),
    ("/predict", "classify"),
    ("/v1/decisions", "decisions"),
    ("/tokenize", "tokenizer"),
    ("/detokenize", "tokenizer"),
    ("/v1/models", "models"),
    ("/v1/files", "files"),
    ("/v1/batches", "batches"),
    ("/v1/organization/", "operations"),
    ("/headrace/", "operations"),
    ("/page/", "page"),
    ("/health", "probes"),
    ("/ready", "probes"),
)

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)


def endpoint_of(path: str) -> Endpoint:
    """Return the metric label of a path: one of a closed set."""
    if path == "/":
        return "page"
    return next((endpoint for prefix, endpoint in _PREFIXES if path.startswith(prefix)), "other")


class RequestLog:
    """The middleware."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app: Final = app
        self._metrics: Final = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send, self._metrics)
        try:
            await self._app(scope, receive, exchange.send)
        except asyncio.CancelledError:
            # Shutdown cancels open requests. A stream is cut without its end, so that its client rejoins it.
            logger.info("request cut off by shutdown", id=exchange.request_id)
            if exchange.status is None:
                message = "the gateway is shutting down; try again"
                headers = {"retry-after": "1", "connection": "close"}
                failure = ApiError(503, "server_error", GatewayCode.STOPPING, message, headers=headers)
                await self._fail(failure, exchange, scope, receive)
        except Exception as error:  # noqa: BLE001  # every request gets a response, and the server keeps running
            # the text of an error may quote the request, and the server would log it
            logger.error("request failed", id=exchange.request_id, exception=frames(error))
            if exchange.status is None:
                message = f"internal error; see the gateway's log for request {exchange.request_id}"
                failure = ApiError(500, "server_error", GatewayCode.INTERNAL_ERROR, message)
                await self._fail(failure, exchange, scope, receive)
        finally:
            exchange.close()

    async def _fail(self, failure: ApiError, exchange: "_Exchange", scope: Scope, receive: Receive) -> None:
        scope["state"]["refusal"] = failure.code
        await ErrorResponse(failure)(scope, receive, exchange.send)


class _Exchange:
    """One request and its response."""

    def __init__(self, scope: Scope, send: Send, metrics: GatewayMetrics) -> None:
        self._scope: Final = scope
        self._send: Final = send
        self._metrics: Final = metrics
        self._began: Final = time.monotonic()
        self._endpoint: Final = endpoint_of(scope["path"])
        self._is_stream = False
        self._has_body = False
        self._state: Final[dict[str, Any]] = scope.setdefault("state", {})
        self.request_id: Final = f"req_{uuid.uuid4().hex}"
        self.status: int | None = None
        self._state["request_id"] = self.request_id

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start(message)
        elif message.get("body") and not self._has_body:
            self._has_body = True
            if self._endpoint in ("chat_completions", "completions", "messages", "responses") and self.status == 200:
                self._metrics.first_byte(time.monotonic() - self._began)
        await self._send(message)

    def _start(self, message: Message) -> None:
        self.status = message["status"]
        headers = MutableHeaders(scope=message)
        headers["x-request-id"] = self.request_id
        if self._endpoint == "messages":
            headers["request-id"] = self.request_id  # Anthropic's SDKs read this one
        headers["openai-processing-ms"] = str(round((time.monotonic() - self._began) * 1000))
        client_id = Headers(scope=self._scope).get("x-request-id", "")
        if _CLIENT_ID.fullmatch(client_id):
            headers["x-client-request-id"] = client_id
        headers.update(self._state.get("answer_headers", {}))
        if "ignored" in self._state:
            headers["x-headrace-ignored"] = self._state["ignored"]
            self._metrics.fields_ignored(self._endpoint)
        if headers.get("content-type", "").startswith("text/event-stream"):
            self._is_stream = True
            self._metrics.stream_opened()

    def close(self) -> None:
        seconds = time.monotonic() - self._began
        if self._is_stream:
            self._metrics.stream_closed()
        self._metrics.answered(self._endpoint, self.status)
        refusal = self._state.get("refusal")
        if refusal is not None:
            self._metrics.refused(refusal)
        is_poll = self._scope["path"] == "/headrace/overview" and self.status == 200  # each page sends one per second
        if self._endpoint == "probes" or is_poll:
            return
        key = self._state.get("key")
        logger.info(
            "request answered",
            id=self.request_id,
            endpoint=self._endpoint,
            method=self._scope["method"][:16],
            status=self.status,
            key=key.name if key else None,
            code=refusal,
            seconds=round(seconds, 3),
        )
