"""The endpoints of chat completions."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_gateway.chat.fields import read_chat
from headrace_gateway.chat.stream import ChatStream
from headrace_gateway.generation import Api, create, retrieve
from headrace_gateway.requests.call import ChatOptions

CHAT: Final = Api("chatcmpl-", read_chat, ChatOptions, ChatStream)


async def create_chat(request: Request) -> Response:
    """`POST /v1/chat/completions`."""
    return await create(request, CHAT)


async def retrieve_chat(request: Request) -> Response:
    """`GET /v1/chat/completions/{id}`: the answer, or its stream after a cursor."""
    return await retrieve(request, CHAT)


routes: Final = [
    Route("/v1/chat/completions", create_chat, methods=["POST"]),
    Route("/v1/chat/completions/{id}", retrieve_chat, methods=["GET"]),
]
