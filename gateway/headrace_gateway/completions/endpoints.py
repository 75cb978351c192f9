"""The endpoints of text completions."""

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_broker import RegisteredModel
from headrace_gateway.completions.fields import read_completion
from headrace_gateway.completions.stream import CompletionStream
from headrace_gateway.generation import Api, create, retrieve
from headrace_gateway.requests.call import Call, CompletionOptions


def _read(body: dict[str, Any], *, model: RegisteredModel, lora: str | None) -> Call:  # noqa: ARG001
    return read_completion(body, lora=lora)


COMPLETIONS: Final = Api("cmpl-", _read, CompletionOptions, CompletionStream)


async def create_completion(request: Request) -> Response:
    """`POST /v1/completions`."""
    return await create(request, COMPLETIONS)


async def retrieve_completion(request: Request) -> Response:
    """`GET /v1/completions/{id}`: the answer, or its stream after a cursor."""
    return await retrieve(request, COMPLETIONS)


routes: Final = [
    Route("/v1/completions", create_completion, methods=["POST"]),
    Route("/v1/completions/{id}", retrieve_completion, methods=["GET"]),
]
