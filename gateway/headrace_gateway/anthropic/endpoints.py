"""Anthropic's Messages API: create a message, retrieve one, count the tokens of a prompt."""

from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_gateway.admission import admitted_body, report_ignored
from headrace_gateway.answers.event_stream import named_event
from headrace_gateway.answers.reader import Cursor
from headrace_gateway.anthropic.fields import read_counted, read_message
from headrace_gateway.anthropic.stream import MessageStream
from headrace_gateway.context import gateway_of, key_of
from headrace_gateway.errors import ApiError
from headrace_gateway.generation import Api, create, require_redis, retrieve
from headrace_gateway.http.json import JsonResponse, anthropic_error
from headrace_gateway.models.tokenizers import count_tokens
from headrace_gateway.requests.body import model_named
from headrace_gateway.requests.call import MessageOptions
from headrace_gateway.requests.headers import ResumeStyle

_PING: Final = named_event({"type": "ping"})


class MessageEncoder:
    """Encodes named events. On request each event has its cursor, in an `id:` line or in its data."""

    end: bytes = b""
    keep_alive: bytes = _PING

    def __init__(self, style: ResumeStyle) -> None:
        self._style: Final = style

    def event(self, chunk: dict[str, Any], cursor: Cursor) -> bytes:
        if self._style == "chunk":
            chunk = {**chunk, "headrace": {"cursor": str(cursor)}}
        written = named_event(chunk)
        return b"id: %b\n%b" % (str(cursor).encode(), written) if self._style == "id" else written

    def error(self, failure: ApiError) -> bytes:
        return named_event(anthropic_error(failure)[0])


MESSAGES: Final = Api("msg_", read_message, MessageOptions, MessageStream, MessageEncoder)


async def create_message(request: Request) -> Response:
    """`POST /v1/messages`."""
    return await create(request, MESSAGES)


async def retrieve_message(request: Request) -> Response:
    """`GET /v1/messages/{id}`: the message, or its stream after a cursor."""
    return await retrieve(request, MESSAGES)


async def count_message_tokens(request: Request) -> Response:
    """`POST /v1/messages/count_tokens`."""
    gateway, key = gateway_of(request), key_of(request)
    require_redis(request)
    async with admitted_body(request) as body:
        model, lora = await gateway.models.find(await body.read(model_named), key)
        call = await body.read(partial(read_counted, model=model, lora=lora))
    report_ignored(request, call.ignored)
    count = await count_tokens(gateway, key, model, call.requests[0], prompt_field="messages")
    return JsonResponse({"input_tokens": count})


routes: Final = [
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_message_tokens, methods=["POST"]),
    Route("/v1/messages/{id}", retrieve_message, methods=["GET"]),
]
