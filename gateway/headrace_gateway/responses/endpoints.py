"""The Responses API: create, retrieve, cancel and delete a response, and list its input items."""

import dataclasses
import time
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_broker import RegisteredModel
from headrace_broker.keys import ended_key, stream_key
from headrace_broker.server.asking_homes import server_having, unless_away_async
from headrace_broker.server.shards import id_in_keys
from headrace_broker.streams.listeners import send_heartbeat
from headrace_gateway import generation
from headrace_gateway.admission import admitted_body, report_ignored
from headrace_gateway.answers.envelope import Envelope
from headrace_gateway.answers.event_stream import ResponseEncoder, unless_disconnected
from headrace_gateway.context import Gateway, gateway_of, key_of
from headrace_gateway.errors import ApiError, invalid
from headrace_gateway.http.broker_errors import not_found
from headrace_gateway.http.json import JsonResponse, page_of, read_integer
from headrace_gateway.keys.api_key import ApiKey
from headrace_gateway.requests.body import Body
from headrace_gateway.requests.call import Call, ResponseOptions
from headrace_gateway.requests.headers import LONGEST_EXPIRES, CallHeaders, read_headers
from headrace_gateway.responses.chain import read_history, read_named, stored_items_named, with_references
from headrace_gateway.responses.fields import read_response
from headrace_gateway.responses.input_items import Item
from headrace_gateway.responses.replay import replay
from headrace_gateway.responses.stream import ResponseStream, response_object
from headrace_wire.codes import GatewayCode

RESPONSES: Final = generation.Api("resp_", read_response, ResponseOptions, ResponseStream)
MAX_PAGE: Final = 100
_PAGE: Final = 20


async def create(request: Request) -> Response:
    """`POST /v1/responses`."""
    arrived = time.monotonic()
    gateway, key = gateway_of(request), key_of(request)
    generation.require_redis(request)
    headers = read_headers(request.headers, gateway.settings)
    async with admitted_body(request) as body:
        call, model = await read_call(request, body)
        report_ignored(request, call.ignored)
        assert isinstance(call.options, ResponseOptions)
        if call.options.background:
            headers = _in_background(request, headers)
        envelope = await generation.submit(gateway, key, call, headers, RESPONSES, model)
    is_late = headers.idempotency_key is not None and await _is_stream_gone(gateway, envelope.id)
    if call.stream:
        if is_late:
            raise _stream_expired()
        encoder = ResponseEncoder()
        at_once = call.options.background
        return await generation.streamed(gateway, key, envelope, RESPONSES, encoder, arrived=arrived, at_once=at_once)
    if call.options.background or is_late:
        return await _as_it_is(gateway, key, envelope)
    return await unless_disconnected(request.receive, partial(generation.plain, gateway, key, envelope, RESPONSES))


async def read_call(request: Request, body: Body) -> tuple[Call, RegisteredModel]:
    """Read the body, and the stored items that it continues or refers to. Return the call and its model."""
    gateway, key = gateway_of(request), key_of(request)
    named = await body.read(stored_items_named)
    model, lora = await gateway.models.find(named.model, key)
    history = await read_history(gateway, key, named.previous)
    items = await read_named(gateway, key, named.items)
    return await body.read(partial(_read_call, model=model, lora=lora, history=history, items=items)), model


def _read_call(
    body: dict[str, Any], *, model: RegisteredModel, lora: str | None, history: list[Item], items: dict[str, Item]
) -> Call:
    whole = {**body, "input": with_references(body.get("input"), items)}
    return read_response(whole, model=model, lora=lora, history=history)


def _in_background(request: Request, headers: CallHeaders) -> CallHeaders:
    """Turn abandonment off and set a long expiry, because perhaps no client reads the stream."""
    named = "x-headrace-expires" in request.headers
    return dataclasses.replace(
        headers, abandon_after=None, expires=headers.expires if named else max(headers.expires, LONGEST_EXPIRES)
    )


async def retrieve(request: Request) -> Response:
    """`GET /v1/responses/{id}`: the object, or the events after a sequence number."""
    gateway, envelope = await _find(request)
    starting_after = request.query_params.get("starting_after")
    if not generation.flag(request, "stream"):
        if starting_after is not None:
            raise invalid("starting_after requires stream=true", param="starting_after")
        return await _as_it_is(gateway, key_of(request), envelope)
    after = None if starting_after is None else read_integer(starting_after, "starting_after", 0, 10**18)
    if await _is_stream_gone(gateway, envelope.id):
        raise _stream_expired()
    gateway.metrics.rejoined("start" if after is None else "cursor")
    encoder = ResponseEncoder(-1 if after is None else after)
    return await generation.streamed(gateway, key_of(request), envelope, RESPONSES, encoder, after, at_once=True)


async def cancel(request: Request) -> Response:
    """`POST /v1/responses/{id}/cancel`."""
    gateway, envelope = await _find(request)
    assert isinstance(envelope.options, ResponseOptions)
    if not envelope.options.background:
        message = "only responses with background: true can be cancelled: to stop this one, close its connection"
        raise invalid(message, code=GatewayCode.NOT_IN_BACKGROUND)
    await _stop(gateway, envelope.id)
    return await _as_it_is(gateway, key_of(request), envelope)


async def delete(request: Request) -> Response:
    """`DELETE /v1/responses/{id}`. A running response is cancelled."""
    gateway, envelope = await _find(request)
    # cancel first: if the deletion is interrupted, a repeat still finds the response
    had_ended = await _stop(gateway, envelope.id)
    await gateway.responses.delete(envelope.id, had_ended=had_ended)
    await gateway.stored.change(envelope.key, envelope.tenant, envelope.id, 0, 0)
    return JsonResponse({"id": envelope.id, "object": "response", "deleted": True})


async def input_items(request: Request) -> Response:
    """`GET /v1/responses/{id}/input_items`, paginated."""
    gateway, envelope = await _find(request)
    items = await gateway.responses.input_items(envelope.id)
    if items is None:
        raise not_found(f"the input of {envelope.id!r} is not stored")
    what = "an input item of this response"
    return JsonResponse(page_of(items[::-1], request.query_params, what, default=_PAGE, most=MAX_PAGE))


async def compact(_request: Request) -> Response:
    """`POST /v1/responses/compact`, which would otherwise match the route of an id."""
    raise not_found("compaction is not supported: send the items to keep as input")


async def _find(request: Request) -> tuple[Gateway, Envelope]:
    generation.require_redis(request)
    gateway = gateway_of(request)
    envelope = await gateway.envelopes.get(request.path_params["id"], key_of(request))
    if not isinstance(envelope.options, ResponseOptions):
        raise not_found(f"the id {envelope.id!r} belongs to another endpoint")
    return gateway, envelope


async def _stop(gateway: Gateway, response_id: str) -> bool:
    """Cancel the request unless it has ended. Return whether it had ended."""
    if await gateway.responses.has_ended(response_id) or await _is_stream_gone(gateway, response_id):
        return True
    return not await gateway.client.cancel(response_id)


async def _is_stream_gone(gateway: Gateway, response_id: str) -> bool:
    """Return whether the response has ended and its events have expired."""
    server, name = await server_having(gateway.streams, response_id)
    if await server.exists(stream_key(name)):
        return False
    return bool(await server.exists(ended_key(name))) or await gateway.responses.has_ended(response_id)


def _stream_expired() -> ApiError:
    message = "the events of this response have expired: retrieve it without stream"
    return invalid(message, code=GatewayCode.STREAM_EXPIRED, param="stream")


async def _as_it_is(gateway: Gateway, key: ApiKey, envelope: Envelope) -> Response:
    """Return the object as it is now. Its tokens are charged once they are known."""
    state = await gateway.responses.state(envelope.id)
    if state is None:
        stream = await replay(gateway.streams, envelope)
        if stream is None:
            raise not_found(f"the response {envelope.id!r} has expired")
        await _listen(gateway, stream, envelope.id)
        state = stream.state()
    if state["usage"] is not None:
        await gateway.limits.charge(key.name, key.tokens_per_minute, envelope.id, state["usage"]["total_tokens"])
    return JsonResponse(response_object(envelope, state), headers={"x-headrace-id": envelope.id})


async def _listen(gateway: Gateway, stream: ResponseStream, response_id: str) -> None:
    """Send the subscriber heartbeat: a client that polls a response counts as a subscriber."""
    if not stream.has_ended:
        for home in await gateway.streams.homes(response_id):
            async with unless_away_async(home), (await gateway.streams.of(home)).pipeline(transaction=False) as pipe:
                send_heartbeat(pipe, id_in_keys(home, response_id))
                await pipe.execute()


_ID: Final = "/v1/responses/{id}"
routes: Final = [
    Route("/v1/responses", create, methods=["POST"]),
    Route(_ID, retrieve, methods=["GET"]),
    Route(_ID, delete, methods=["DELETE"]),
    Route(f"{_ID}/cancel", cancel, methods=["POST"]),
    Route(f"{_ID}/input_items", input_items, methods=["GET"]),
]
refused: Final = [Route("/v1/responses/compact", compact, methods=["POST"])]
"""Endpoints of OpenAI that are not supported. They must precede `routes`."""
