"""Shared by the endpoints of all APIs that generate: create an answer; retrieve an answer, or its stream."""

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace_broker import RegisteredModel, SubmitRequest
from headrace_broker.keys import IDEMPOTENCY_SECONDS, ended_key, stream_key
from headrace_broker.server.asking_homes import server_having
from headrace_broker.server.connections import REDIS_ERRORS
from headrace_gateway.admission import admitted_body, report_ignored
from headrace_gateway.answers.complete_answer import CompleteAnswer
from headrace_gateway.answers.envelope import Envelope, new_id, with_ids
from headrace_gateway.answers.event_stream import DataEncoder, EventEncoder, EventStream, unless_disconnected
from headrace_gateway.answers.reader import AnswerReader, AnswerStream, ChunkAndCursor, Cursor, Position, open_reader
from headrace_gateway.context import Gateway, gateway_of, key_of
from headrace_gateway.errors import invalid
from headrace_gateway.http.broker_errors import REFUSALS, not_found, unavailable
from headrace_gateway.http.json import JsonResponse
from headrace_gateway.keys.api_key import ApiKey
from headrace_gateway.keys.limits import LEAST_STREAM_TOKENS
from headrace_gateway.redis.keys import envelope_key, response_key
from headrace_gateway.requests.body import model_named
from headrace_gateway.requests.call import AnswerOptions, Call, ResponseOptions, with_usage
from headrace_gateway.requests.call_fields import bounded_priority
from headrace_gateway.requests.headers import CallHeaders, ResumeStyle, read_headers
from headrace_gateway.requests.request_size import encoded_bytes, request_bytes
from headrace_gateway.requests.token_bound import most_tokens
from headrace_wire.codes import ErrorCode

_PLAIN_WAIT: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Api:
    """How one API reads its bodies and writes its answers."""

    prefix: str
    """Prefix of the ids of its answers, such as `chatcmpl-`."""
    read: Callable[..., Call]
    """Makes the Call from the body, the `model` and the adapter `lora`. Must be picklable: a function of a module."""
    options: type[AnswerOptions]
    stream: Callable[[Envelope], AnswerStream]
    encoder: Callable[[ResumeStyle], EventEncoder] = DataEncoder


async def create(request: Request, api: Api) -> Response:
    """Submit a request and return its answer, or its stream."""
    arrived = time.monotonic()
    gateway, key = gateway_of(request), key_of(request)
    require_redis(request)
    headers = read_headers(request.headers, gateway.settings)
    async with admitted_body(request) as body:
        model, lora = await gateway.models.find(await body.read(model_named), key)
        call = await body.read(partial(api.read, model=model, lora=lora))
        state = request.scope["state"]
        state["answer_headers"] = await gateway.limits.admit_choices(key, call.num_choices, state["answer_headers"])
        report_ignored(request, call.ignored)
        envelope = await submit(gateway, key, call, headers, api, model)
    if call.stream:
        return await streamed(gateway, key, envelope, api, api.encoder(headers.resume), arrived=arrived)
    return await unless_disconnected(request.receive, partial(plain, gateway, key, envelope, api))


async def submit(
    gateway: Gateway, key: ApiKey, call: Call, headers: CallHeaders, api: Api, model: RegisteredModel
) -> Envelope:
    """Store the envelope, then submit the requests: an answer in the queue always has its envelope.

    Raises ApiError 400 for a request that is far larger than the context of the model that serves it.
    """
    size = request_bytes(call, model)
    envelope = Envelope.of(call, new_id(api.prefix), key, expires=int(headers.expires))
    answer_id = envelope.id
    options: SubmitRequest = {
        "model": model.name,
        "tenant": key.tenant,
        "key_name": key.name,
        "cache_salt": key.cache_salt,
        "priority": bounded_priority(call.priority if headers.priority is None else headers.priority, key),
        "expires": headers.expires,
        "due": datetime.fromtimestamp(envelope.due, UTC) if envelope.due and key.may_be_urgent else None,
        "abandon_after": headers.abandon_after,
        "prefix_key": call.prefix_key,
    }
    requests: list[SubmitRequest] = []
    for number, (request, request_id) in enumerate(zip(call.requests, envelope.request_ids, strict=True)):
        requests.append({**options, "request": request, "request_id": request_id})
        if headers.idempotency_key is not None:
            name = f"{api.prefix.rstrip('-_')}:{number}:{key.name}:{headers.idempotency_key}"
            requests[-1]["idempotency_key"] = name
    tokens: dict[str, int] = {}
    if key.tokens_per_day is not None:
        bounds = (most_tokens(request, model.max_model_len) for request in call.requests)
        tokens = dict(zip(envelope.request_ids, bounds, strict=True))
    names = [each.get("idempotency_key") for each in requests]
    async with gateway.budgets.reserved(key, model.name, tokens, headers.expires, names) as sending:
        envelope = await _counted(gateway, envelope, call, size)
        try:
            await _keep(gateway, envelope, call)
            sending.has_begun = True
            sending.accepted = accepted = await _send(gateway, requests)
        except REFUSALS:  # after any other error the request may still be in the queue
            await forget(gateway, envelope)
            raise
    if accepted[0] == answer_id:
        return envelope
    await forget(gateway, envelope)
    earlier = await gateway.envelopes.find(accepted[0])
    if (earlier is None or gateway.envelopes.is_old(earlier)) and await _is_gone(gateway, accepted[0]):
        raise not_found("the answer of this Idempotency-Key was deleted or has expired: choose a new key")
    if earlier is None:
        # The queue was full for the first request with this Idempotency-Key. The key stays bound to that request's id.
        await _keep(gateway, msgspec.structs.replace(envelope, id=accepted[0], request_ids=tuple(accepted)), call)
    return await gateway.envelopes.get(accepted[0], key)


async def _is_gone(gateway: Gateway, answer_id: str) -> bool:
    """Return whether an answer was deleted, or ended so long ago that its stream has expired.

    The mark of its end expires, too, before its Idempotency-Key. Then its message is no longer in the queue, and
    the mark is written again, so that further retries need no search.
    """
    if await gateway.responses.was_deleted(answer_id):
        return True
    server, name = await server_having(gateway.streams, answer_id)
    async with gateway.searching:
        has_mark = await server.exists(ended_key(name))  # read first: a request may begin and end between two reads
        if await server.exists(stream_key(name)):
            return False
        if not has_mark and await gateway.client.is_known(answer_id) is not False:
            return False
        if not has_mark:
            await server.set(ended_key(name), "1", ex=IDEMPOTENCY_SECONDS)
    return True


async def _keep(gateway: Gateway, envelope: Envelope, call: Call) -> None:
    if isinstance(envelope.options, ResponseOptions):
        await gateway.responses.put(envelope, with_ids(call.input_items, envelope.id))
    else:
        await gateway.envelopes.put(envelope)


async def forget(gateway: Gateway, envelope: Envelope) -> None:
    """Delete the envelope and the stored response. Nobody can read the stream without them; it expires by itself."""
    await gateway.redis.delete(envelope_key(envelope.id), response_key(envelope.id))
    if envelope.counted_bytes:
        await gateway.stored.change(envelope.key, envelope.tenant, envelope.id, 0, 0)


async def _counted(gateway: Gateway, envelope: Envelope, call: Call, size: int) -> Envelope:
    """Count the bytes that the request keeps in Redis. Raises ApiError 429 if its tenant has no room for them."""
    size += gateway.envelopes.size(envelope) + encoded_bytes(call.input_items)
    life = gateway.envelopes.life(envelope)
    counted = await gateway.stored.admit(envelope.key, envelope.tenant, envelope.id, size, life)
    return msgspec.structs.replace(envelope, counted_bytes=counted)


async def _send(gateway: Gateway, requests: list[SubmitRequest]) -> list[str]:
    if len(requests) > 1:
        return await gateway.client.submit_many(requests)
    return [await gateway.client.submit(**requests[0])]


def require_redis(request: Request) -> None:
    """Raise ApiError 503 at once while Redis is down. Each command would wait for its full timeout and be retried."""
    if request.app.state.redis_watch.is_down:
        raise unavailable()


async def retrieve(request: Request, api: Api) -> Response:
    """Return the answer with this id, if it is one of this API, or its stream after a cursor."""
    require_redis(request)
    gateway, key = gateway_of(request), key_of(request)
    envelope = await gateway.envelopes.get(request.path_params["id"], key)
    if not isinstance(envelope.options, api.options):
        raise not_found(f"the answer {envelope.id!r} belongs to another endpoint")
    style = read_headers(request.headers, gateway.settings).resume
    last_event_id = request.headers.get("last-event-id")
    after = Cursor.parse(last_event_id, param="last-event-id") if last_event_id else None
    starting_after = request.query_params.get("starting_after")
    if starting_after is not None:
        after = Cursor.parse(starting_after, param="starting_after")
    accepts_events = "text/event-stream" in request.headers.get("accept", "")
    if not (flag(request, "stream") or last_event_id or accepts_events):
        wait = partial(plain, gateway, key, envelope, api, gateway.settings.hold_status)
        return await unless_disconnected(request.receive, wait)
    if len(envelope.request_ids) > 1:
        message = "the stream of several prompts cannot be rejoined: get the whole answer without stream"
        raise invalid(message, code=ErrorCode.UNSUPPORTED, param="stream")
    if style == "none" and (last_event_id or accepts_events):
        style = "id"
    gateway.metrics.rejoined("start" if after is None else "cursor")
    return await streamed(gateway, key, envelope, api, api.encoder(style), after)


def flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise invalid(f"{name} must be true or false, got {value[:20]!r}", param=name)
    return value in ("true", "1")


@asynccontextmanager
async def charged_reader(
    gateway: Gateway, key: ApiKey, envelope: Envelope, api: Api, after: Position | None = None
) -> AsyncIterator[AnswerReader]:
    """Open a reader whose tokens are charged to the key, even if it is closed before the end."""
    async with open_reader(gateway.hub, envelope, api.stream(envelope), after) as reader:
        try:
            async with gateway.limits.charging(key, envelope.id, lambda: reader.num_tokens):
                yield reader
        finally:
            if reader.has_ended:
                await count_end(gateway, envelope)
            if reader.num_output_tokens >= LEAST_STREAM_TOKENS:
                with contextlib.suppress(*REDIS_ERRORS):  # without Redis, these streams are not counted
                    life = gateway.envelopes.result_ttl
                    await gateway.stored.count_streams(envelope.key, envelope.tenant, envelope.request_ids, life)


async def count_end(gateway: Gateway, envelope: Envelope) -> None:
    """Replace the count of an ended answer by the size of its envelope. The collector does so for stored responses."""
    is_collected = isinstance(envelope.options, ResponseOptions) and (
        envelope.options.store or envelope.options.background
    )
    if envelope.counted_bytes and not is_collected:
        left = gateway.envelopes.size(envelope), gateway.envelopes.life(envelope)
        with contextlib.suppress(*REDIS_ERRORS):  # without Redis, the count expires later by itself
            await gateway.stored.change(envelope.key, envelope.tenant, envelope.id, *left)


async def streamed(
    gateway: Gateway,
    key: ApiKey,
    envelope: Envelope,
    api: Api,
    encoder: EventEncoder,
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
        reader = await opened.enter_async_context(charged_reader(gateway, key, envelope, api, after))
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
            encoder=encoder,
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


async def plain(gateway: Gateway, key: ApiKey, envelope: Envelope, api: Api, seconds: float = _PLAIN_WAIT) -> Response:
    """Return the whole answer; 202 if it is not complete within `seconds`."""
    envelope = msgspec.structs.replace(envelope, options=with_usage(envelope.options))
    deadline = time.monotonic() + seconds
    answer = CompleteAnswer(envelope.options)
    async with charged_reader(gateway, key, envelope, api) as reader:
        while not reader.has_ended:
            chunks = await reader.take(max(0.0, deadline - time.monotonic()))
            if chunks is None:
                return _unfinished(envelope)
            if reader.error is not None:
                raise reader.error
            for chunk, _ in chunks:
                answer.add(chunk)
    return JsonResponse(answer.whole(), headers={"x-headrace-id": envelope.id})


def _unfinished(envelope: Envelope) -> Response:
    body = {"id": envelope.id, "created": envelope.created, "model": envelope.model, "status": "in_progress"}
    return JsonResponse(body, status=202, headers={"retry-after": "1"})
