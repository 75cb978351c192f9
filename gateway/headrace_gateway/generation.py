"""The endpoints that generate: create an answer, and retrieve one, from any cursor."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_broker import InvalidRequestError, QueueFullError, RegisteredModel, SubmitRequest, UnknownModelError
from headrace_broker.keys import ended_key, stream_key
from headrace_gateway import sse
from headrace_gateway.answer_reader import AnswerReader, ChunkAndCursor, Position, open_reader
from headrace_gateway.body import read_json
from headrace_gateway.broker_errors import not_found, unavailable
from headrace_gateway.call import AnswerForm, Call, ChatForm, CompletionForm, ResponseForm, with_usage
from headrace_gateway.call_fields import bounded_priority
from headrace_gateway.chat_fields import read_chat
from headrace_gateway.completion_fields import read_completion
from headrace_gateway.context import Gateway, gateway_of, key_of
from headrace_gateway.cursor import Cursor
from headrace_gateway.envelope import Envelope
from headrace_gateway.errors import ApiError, invalid
from headrace_gateway.event_stream import EventStream, unless_disconnected
from headrace_gateway.fold import fold
from headrace_gateway.headers import CallHeaders, ResumeStyle, read_headers
from headrace_gateway.ids import new_id
from headrace_gateway.input_items import with_ids
from headrace_gateway.json_response import JsonResponse
from headrace_gateway.keys import ApiKey
from headrace_gateway.redis_keys import envelope_key, response_key

_PLAIN_WAIT: Final = 3600.0
_REFUSALS: Final = (InvalidRequestError, UnknownModelError, QueueFullError)
"""Errors after which nothing was put into the queue."""


async def create_chat(request: Request) -> Response:
    """`POST /v1/chat/completions`."""
    return await create(request, "chatcmpl-", lambda body, model, lora: read_chat(body, model=model, lora=lora))


async def create_completion(request: Request) -> Response:
    """`POST /v1/completions`."""
    return await create(request, "cmpl-", lambda body, _model, lora: read_completion(body, lora=lora))


async def create(
    request: Request,
    prefix: str,
    read: Callable[[dict[str, Any], RegisteredModel, str | None], Call],
    framing: Callable[[ResumeStyle], sse.Framing] = sse.DataFraming,
) -> Response:
    """Submit a request and return its answer, or its stream.

    Args:
        prefix: of the answer's id.
        read: makes the call from the body, its model and its adapter.
    """
    arrived = time.monotonic()
    gateway, key = gateway_of(request), key_of(request)
    require_redis(request)
    headers = read_headers(request.headers, gateway.settings)
    body = await read_json(request, gateway.settings.max_body_bytes)
    model, lora = await gateway.models.find(body.get("model"), key)
    call = read(body, model, lora)
    request.scope["state"]["answer_headers"] = await gateway.limits.admit(key)
    envelope = await submit(gateway, key, call, headers, prefix, model.name)
    if call.stream:
        return await streamed(gateway, key, envelope, framing(headers.resume), arrived=arrived)
    return await unless_disconnected(request.receive, partial(plain, gateway, key, envelope))


async def submit(
    gateway: Gateway, key: ApiKey, call: Call, headers: CallHeaders, prefix: str, queue_model: str
) -> Envelope:
    """Store the envelope, then submit the requests: an answer in the queue always has its envelope."""
    envelope = Envelope.of(call, new_id(prefix), key, expires=int(headers.expires))
    answer_id = envelope.id
    options: SubmitRequest = {
        "model": queue_model,
        "tenant": key.tenant,
        "priority": bounded_priority(call.priority if headers.priority is None else headers.priority, key),
        "expires": headers.expires,
        "abandon_after": headers.abandon_after,
    }
    requests = [
        _named({**submission, **options, "request_id": request_id}, headers, key, prefix.rstrip("-_"), number)
        for number, (submission, request_id) in enumerate(zip(call.submissions, envelope.request_ids, strict=True))
    ]
    await _keep(gateway, envelope, call)
    try:
        accepted = await _send(gateway, requests)
    except _REFUSALS as error:  # after any other error the request may still be in the queue
        await forget(gateway, answer_id)
        if isinstance(error, InvalidRequestError) and any("was used with another" in each for each in error.problems):
            message = "the Idempotency-Key was used with another request: choose a new key"
            raise ApiError(422, "invalid_request_error", "idempotency_key_reused", message) from error
        raise
    if accepted[0] == answer_id:
        return envelope
    await forget(gateway, answer_id)
    if await gateway.envelopes.find(accepted[0]) is None:
        if await _is_gone(gateway, accepted[0]):
            raise not_found("the answer of this Idempotency-Key was deleted or has expired: choose a new key")
        # The queue was full for the key's first request: its id stays bound to the key.
        await _keep(gateway, msgspec.structs.replace(envelope, id=accepted[0], request_ids=tuple(accepted)), call)
    return await gateway.envelopes.get(accepted[0], key)


async def _is_gone(gateway: Gateway, answer_id: str) -> bool:
    """Return whether an answer without an envelope was deleted, or ended so long ago that its stream has expired."""
    if await gateway.responses.was_deleted(answer_id):
        return True
    stream, ended = stream_key(answer_id), ended_key(answer_id)
    return not await gateway.redis.exists(stream) and bool(await gateway.redis.exists(ended))


async def _keep(gateway: Gateway, envelope: Envelope, call: Call) -> None:
    if isinstance(envelope.form, ResponseForm):
        await gateway.responses.put(envelope, with_ids(call.input_items, envelope.id))
    else:
        await gateway.envelopes.put(envelope)


async def forget(gateway: Gateway, answer_id: str) -> None:
    """Delete what is stored of an answer. Without it nobody can read the stream, which expires by itself."""
    await gateway.redis.delete(envelope_key(answer_id), response_key(answer_id))


async def _send(gateway: Gateway, requests: list[SubmitRequest]) -> list[str]:
    if len(requests) > 1:
        return await gateway.client.submit_many(requests)
    options: dict[str, Any] = dict(requests[0])
    prompt, params = options.pop("prompt", None), options.pop("sampling_params", None)
    return [await gateway.client.submit(prompt, params, **options)]


def _named(request: SubmitRequest, headers: CallHeaders, key: ApiKey, kind: str, number: int) -> SubmitRequest:
    if headers.idempotency_key is not None:
        request["idempotency_key"] = f"{kind}:{number}:{key.name}:{headers.idempotency_key}"
    return request


async def retrieve_chat(request: Request) -> Response:
    """`GET /v1/chat/completions/{id}`: the answer, or its stream after a cursor."""
    return await retrieve(request, ChatForm)


async def retrieve_completion(request: Request) -> Response:
    """`GET /v1/completions/{id}`."""
    return await retrieve(request, CompletionForm)


def require_redis(request: Request) -> None:
    """Fail fast: each command would wait for its full time-out, and be retried."""
    if request.app.state.redis_watch.is_down:
        raise unavailable()


async def retrieve(
    request: Request, kind: type[AnswerForm], framing: Callable[[ResumeStyle], sse.Framing] = sse.DataFraming
) -> Response:
    """Return the answer with this id, if it has this kind of form, or its stream after a cursor."""
    require_redis(request)
    gateway, key = gateway_of(request), key_of(request)
    envelope = await gateway.envelopes.get(request.path_params["id"], key)
    if not isinstance(envelope.form, kind):
        raise not_found(f"the answer {envelope.id!r} belongs to another endpoint")
    style = read_headers(request.headers, gateway.settings).resume
    last_event_id = request.headers.get("last-event-id")
    after = Cursor.parse(last_event_id, param="last-event-id") if last_event_id else None
    starting_after = request.query_params.get("starting_after")
    if starting_after is not None:
        after = Cursor.parse(starting_after, param="starting_after")
    accepts_events = "text/event-stream" in request.headers.get("accept", "")
    if not (flag(request, "stream") or last_event_id or accepts_events):
        wait = partial(plain, gateway, key, envelope, gateway.settings.hold_status)
        return await unless_disconnected(request.receive, wait)
    if len(envelope.request_ids) > 1:
        message = "the stream of several prompts cannot be rejoined: get the whole answer without stream"
        raise invalid(message, code="unsupported", param="stream")
    if style == "none" and (last_event_id or accepts_events):
        style = "id"
    gateway.metrics.rejoined("start" if after is None else "cursor")
    return await streamed(gateway, key, envelope, framing(style), after)


def flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise invalid(f"{name} must be true or false", param=name)
    return value in ("true", "1")


@asynccontextmanager
async def charged_reader(
    gateway: Gateway, key: ApiKey, envelope: Envelope, after: Position | None = None
) -> AsyncIterator[AnswerReader]:
    """Open a reader whose tokens are charged to the key, even if the client disconnects before the end."""
    async with open_reader(gateway.hub, envelope, after) as reader:
        try:
            yield reader
        finally:
            await gateway.limits.charge(key, envelope.id, reader.num_tokens)


async def streamed(
    gateway: Gateway,
    key: ApiKey,
    envelope: Envelope,
    framing: sse.Framing,
    after: Position | None = None,
    *,
    arrived: float | None = None,
    at_once: bool = False,
) -> EventStream:
    """Wait for the first entry, so that a worker's refusal becomes the HTTP status.

    Args:
        arrived: monotonic time at which the request arrived; a response header reports how long it waited for a worker.
        at_once: do not wait for the first entry: a worker's refusal is then an event of the stream.
    """
    async with AsyncExitStack() as opened:
        reader = await opened.enter_async_context(charged_reader(gateway, key, envelope, after))
        opening = reader.opening()
        first = [] if at_once else await _first(reader, gateway.settings.hold_status)
        if after is None and not at_once and reader.error is not None and not reader.has_output:
            raise reader.error  # no output preceded it
        headers = {"x-headrace-id": envelope.id}
        if arrived is not None and reader.begun_at is not None:
            headers["x-headrace-queued-ms"] = str(round((reader.begun_at - arrived) * 1000))
        return EventStream(
            reader,
            opening + (first or []) if opening else first,
            opened.pop_all(),
            framing=framing,
            keep_alive=gateway.settings.keep_alive,
            headers=headers,
        )


async def _first(reader: AnswerReader, seconds: float) -> list[ChunkAndCursor] | None:
    """Return the first chunks, up to the first output of a worker; None if none has arrived in time."""
    deadline = time.monotonic() + seconds
    found: list[ChunkAndCursor] = []
    while not reader.has_ended:
        chunks = await reader.take(max(0.0, deadline - time.monotonic()))
        if chunks is None:
            return found or None
        found += chunks
        if found and reader.has_output:
            break
    return found


async def plain(gateway: Gateway, key: ApiKey, envelope: Envelope, seconds: float = _PLAIN_WAIT) -> Response:
    """Return the whole answer; 202 if it is not complete within `seconds`."""
    envelope = msgspec.structs.replace(envelope, form=with_usage(envelope.form))
    deadline = time.monotonic() + seconds
    answer: list[dict[str, Any]] = []
    async with charged_reader(gateway, key, envelope) as reader:
        while not reader.has_ended:
            chunks = await reader.take(max(0.0, deadline - time.monotonic()))
            if chunks is None:
                return _unfinished(envelope)
            answer += [chunk for chunk, _ in chunks]
        if reader.error is not None:
            raise reader.error
    return JsonResponse(fold(answer, envelope.form), headers={"x-headrace-id": envelope.id})


def _unfinished(envelope: Envelope) -> Response:
    body = {"id": envelope.id, "created": envelope.created, "model": envelope.model, "status": "in_progress"}
    return JsonResponse(body, status=202, headers={"retry-after": "1"})


routes: Final = [
    Route("/v1/chat/completions", create_chat, methods=["POST"]),
    Route("/v1/chat/completions/{id}", retrieve_chat, methods=["GET"]),
    Route("/v1/completions", create_completion, methods=["POST"]),
    Route("/v1/completions/{id}", retrieve_completion, methods=["GET"]),
]
