"""Anthropic's Messages API: create a message, retrieve one, count the tokens of a prompt."""

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_gateway import sse
from headrace_gateway.anthropic_errors import anthropic_error
from headrace_gateway.anthropic_fields import read_counted, read_message
from headrace_gateway.body import read_json
from headrace_gateway.call import MessageForm
from headrace_gateway.context import gateway_of, key_of
from headrace_gateway.cursor import Cursor
from headrace_gateway.errors import ApiError
from headrace_gateway.generation import create, require_redis, retrieve
from headrace_gateway.headers import ResumeStyle
from headrace_gateway.json_response import JsonResponse
from headrace_gateway.tokenizer_calls import count_tokens

_PING: Final = sse.named_event({"type": "ping"})


class MessageFraming:
    """Named events. On request each event has its cursor, in an `id:` line or in its data."""

    end: bytes = b""
    keep_alive: bytes = _PING

    def __init__(self, style: ResumeStyle) -> None:
        self._style: Final = style

    def event(self, chunk: dict[str, Any], cursor: Cursor) -> bytes:
        if self._style == "chunk":
            chunk = {**chunk, "headrace": {"cursor": str(cursor)}}
        written = sse.named_event(chunk)
        return b"id: %b\n%b" % (str(cursor).encode(), written) if self._style == "id" else written

    def error(self, failure: ApiError) -> bytes:
        return sse.named_event(anthropic_error(failure)[0])


async def create_message(request: Request) -> Response:
    """`POST /v1/messages`."""
    return await create(
        request, "msg_", lambda body, model, lora: read_message(body, model=model, lora=lora), MessageFraming
    )


async def retrieve_message(request: Request) -> Response:
    """`GET /v1/messages/{id}`: the message, or its stream after a cursor."""
    return await retrieve(request, MessageForm, MessageFraming)


async def count_message_tokens(request: Request) -> Response:
    """`POST /v1/messages/count_tokens`."""
    gateway, key = gateway_of(request), key_of(request)
    require_redis(request)
    body = await read_json(request, gateway.settings.max_body_bytes)
    model, lora = await gateway.models.find(body.get("model"), key)
    call = read_counted(body, model=model, lora=lora)
    request.scope["state"]["answer_headers"] = await gateway.limits.admit(key)
    count = await count_tokens(gateway, key, model, call.submissions[0], prompt_field="messages")
    return JsonResponse({"input_tokens": count})


routes: Final = [
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_message_tokens, methods=["POST"]),
    Route("/v1/messages/{id}", retrieve_message, methods=["GET"]),
]
