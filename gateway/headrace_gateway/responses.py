"""The Responses API: create, retrieve, cancel and delete a response, and list its input items."""

import dataclasses
import time
from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_broker.keys import ended_key, stream_key
from headrace_broker.listeners import send_heartbeat
from headrace_gateway import generation, sse
from headrace_gateway.body import read_json
from headrace_gateway.broker_errors import not_found
from headrace_gateway.call import ResponseForm
from headrace_gateway.context import Gateway, gateway_of, key_of
from headrace_gateway.envelope import Envelope
from headrace_gateway.errors import ApiError, invalid
from headrace_gateway.event_stream import unless_disconnected
from headrace_gateway.headers import LONGEST_EXPIRES, CallHeaders, read_headers
from headrace_gateway.json_response import JsonResponse
from headrace_gateway.keys import ApiKey
from headrace_gateway.object_list import object_list
from headrace_gateway.response_chain import read_history, with_references
from headrace_gateway.response_fields import read_response
from headrace_gateway.response_replay import replay
from headrace_gateway.response_stream import ResponseStream, response_object

MAX_PAGE: Final = 100
_PAGE: Final = 20


async def create(request: Request) -> Response:
    """`POST /v1/responses`."""
    arrived = time.monotonic()
    gateway, key = gateway_of(request), key_of(request)
    generation.require_redis(request)
    headers = read_headers(request.headers, gateway.settings)
    body = await read_json(request, gateway.settings.max_body_bytes)
    model, lora = await gateway.models.find(body.get("model"), key)
    request.scope["state"]["answer_headers"] = await gateway.limits.admit(key)  # before stored items are read
    history = await read_history(gateway, key, body.get("previous_response_id"))
    body["input"] = await with_references(gateway, key, body.get("input"))
    call = read_response(body, model=model, lora=lora, history=history)
    assert isinstance(call.form, ResponseForm)
    if call.form.background:
        headers = _in_background(request, headers)
    envelope = await generation.submit(gateway, key, call, headers, "resp_", model.name)
    is_late = headers.idempotency_key is not None and await _is_stream_gone(gateway, envelope.id)
    if call.stream:
        if is_late:
            raise _stream_expired()
        framing = sse.ResponseFraming()
        at_once = call.form.background
        return await generation.streamed(gateway, key, envelope, framing, arrived=arrived, at_once=at_once)
    if call.form.background or is_late:
        return await _as_it_is(gateway, key, envelope)
    return await unless_disconnected(request.receive, partial(generation.plain, gateway, key, envelope))


def _in_background(request: Request, headers: CallHeaders) -> CallHeaders:
    """Set no abandonment and a long expiry, since nobody need read the stream."""
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
    after = None if starting_after is None else _number(starting_after, "starting_after", 0, 10**18)
    if await _is_stream_gone(gateway, envelope.id):
        raise _stream_expired()
    gateway.metrics.rejoined("start" if after is None else "cursor")
    framing = sse.ResponseFraming(-1 if after is None else after)
    return await generation.streamed(gateway, key_of(request), envelope, framing, after, at_once=True)


async def cancel(request: Request) -> Response:
    """`POST /v1/responses/{id}/cancel`."""
    gateway, envelope = await _find(request)
    assert isinstance(envelope.form, ResponseForm)
    if not envelope.form.background:
        message = "only responses with background: true can be cancelled: to stop this one, close its connection"
        raise invalid(message, code="not_in_background")
    await _stop(gateway, envelope.id)
    return await _as_it_is(gateway, key_of(request), envelope)


async def delete(request: Request) -> Response:
    """`DELETE /v1/responses/{id}`. A running response is cancelled."""
    gateway, envelope = await _find(request)
    await _stop(gateway, envelope.id)  # first: after an interruption a repeat still finds the response
    await gateway.responses.delete(envelope.id)
    return JsonResponse({"id": envelope.id, "object": "response", "deleted": True})


async def input_items(request: Request) -> Response:
    """`GET /v1/responses/{id}/input_items`, paginated."""
    gateway, envelope = await _find(request)
    query = request.query_params
    limit = _number(query["limit"], "limit", 1, MAX_PAGE) if "limit" in query else _PAGE
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order must be asc or desc", param="order")
    items = await gateway.responses.input_items(envelope.id)
    if items is None:
        raise not_found(f"the input of {envelope.id!r} is not stored")
    if order == "desc":
        items.reverse()
    after = query.get("after")
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise invalid("after must be the id of an input item of this response", param="after")
        items = items[places[0] + 1 :]
    return JsonResponse(object_list(items[:limit], has_more=len(items) > limit))


async def compact(_request: Request) -> Response:
    """`POST /v1/responses/compact`, which would otherwise match the route of an id."""
    raise not_found("compaction is not supported: send the items to keep as input")


async def _find(request: Request) -> tuple[Gateway, Envelope]:
    generation.require_redis(request)
    gateway = gateway_of(request)
    envelope = await gateway.envelopes.get(request.path_params["id"], key_of(request))
    if not isinstance(envelope.form, ResponseForm):
        raise not_found(f"the id {envelope.id!r} belongs to another endpoint")
    return gateway, envelope


async def _stop(gateway: Gateway, response_id: str) -> None:
    """Cancel the request unless it has ended."""
    if not (await gateway.responses.has_ended(response_id) or await _is_stream_gone(gateway, response_id)):
        await gateway.client.cancel(response_id)


async def _is_stream_gone(gateway: Gateway, response_id: str) -> bool:
    """Return whether the response has ended and its events have expired."""
    if await gateway.redis.exists(stream_key(response_id)):
        return False
    return bool(await gateway.redis.exists(ended_key(response_id))) or await gateway.responses.has_ended(response_id)


def _stream_expired() -> ApiError:
    message = "the events of this response have expired: retrieve it without stream"
    return invalid(message, code="stream_expired", param="stream")


async def _as_it_is(gateway: Gateway, key: ApiKey, envelope: Envelope) -> Response:
    """Return the object as it is now. Its tokens are charged once they are known."""
    state = await gateway.responses.state(envelope.id)
    if state is None:
        stream = await replay(gateway.redis, envelope)
        if stream is None:
            raise not_found(f"the response {envelope.id!r} has expired")
        await _listen(gateway, stream, envelope.id)
        state = stream.state()
    if state["usage"] is not None:
        await gateway.limits.charge(key, envelope.id, state["usage"]["total_tokens"])
    return JsonResponse(response_object(envelope, state), headers={"x-headrace-id": envelope.id})


async def _listen(gateway: Gateway, stream: ResponseStream, response_id: str) -> None:
    """Send the subscriber heartbeat: a client that polls a response waits for it."""
    if not stream.has_ended:
        async with gateway.redis.pipeline(transaction=False) as pipe:
            send_heartbeat(pipe, response_id)
            await pipe.execute()


def _number(text: str, name: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and low <= int(text) <= high):
        raise invalid(f"{name} must be an integer from {low} to {high}", param=name)
    return int(text)


_ID: Final = "/v1/responses/{id}"
routes: Final = [
    Route("/v1/responses", create, methods=["POST"]),
    Route(_ID, retrieve, methods=["GET"]),
    Route(_ID, delete, methods=["DELETE"]),
    Route(f"{_ID}/cancel", cancel, methods=["POST"]),
    Route(f"{_ID}/input_items", input_items, methods=["GET"]),
]
refused: Final = [Route("/v1/responses/compact", compact, methods=["POST"])]
"""Known from OpenAI, but not supported. They precede `routes`."""
