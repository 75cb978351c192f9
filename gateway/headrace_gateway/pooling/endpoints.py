"""The endpoints of embeddings, rerank, score and classify."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_broker import RegisteredModel
from headrace_broker.client.decision_calls import WholeCall
from headrace_broker.pooling_results import Pooled
from headrace_broker.server.connections import REDIS_ERRORS
from headrace_gateway.admission import admitted_body, report_ignored
from headrace_gateway.answers.event_stream import unless_disconnected
from headrace_gateway.context import Gateway, gateway_of, key_of
from headrace_gateway.errors import invalid
from headrace_gateway.generation import require_redis
from headrace_gateway.http.broker_errors import REFUSALS
from headrace_gateway.http.json import JsonResponse
from headrace_gateway.keys.api_key import ApiKey
from headrace_gateway.pooling.answering import call_of, cancel_all, open_pooled_reader, pooled_of
from headrace_gateway.pooling.classes import CLASSIFY
from headrace_gateway.pooling.cohere import COHERE_EMBED, COHERE_EMBED_V1
from headrace_gateway.pooling.embeddings import EMBEDDINGS
from headrace_gateway.pooling.pooling_body import PoolingApi, PoolingBody
from headrace_gateway.pooling.rerank import RERANK
from headrace_gateway.pooling.scores import SCORE
from headrace_gateway.pooling.tei import TEI_EMBED, TEI_PREDICT, is_tei
from headrace_gateway.requests.body import model_named
from headrace_gateway.requests.call_fields import bounded_priority
from headrace_gateway.requests.headers import CallHeaders, read_headers
from headrace_gateway.requests.problems import header_of
from headrace_gateway.requests.request_size import encoded_bytes
from headrace_gateway.requests.token_bound import most_tokens


async def create(request: Request, api: PoolingApi) -> Response:
    """Submit the messages of a request and return its answer. If the client disconnects, they are cancelled."""
    gateway, key = gateway_of(request), key_of(request)
    require_redis(request)
    headers = read_headers(request.headers, gateway.settings)
    async with admitted_body(request) as raw:
        name = await raw.read(model_named)
        if api.is_tei or (api is RERANK and await raw.read(is_tei)):
            request.scope["state"]["is_tei"] = True
            name = name or request.query_params.get("model") or await _only_model(gateway, key, api)
        model, adapter = await gateway.models.find(name, key, api.task)
        body = await raw.read(partial(api.read_for, model=model, lora=adapter))
        report_ignored(request, body.ignored)
        call = call_of(body, _queue_options(body, model.name, key, headers, api), key)
        request_ids = await _submit(gateway, key, call, headers, model)
    work = partial(_answered, gateway, key, api, body, call, request_ids, headers)
    return await unless_disconnected(request.receive, work)


async def _only_model(gateway: Gateway, key: ApiKey, api: PoolingApi) -> str:
    """Return the only model that serves the task, for APIs whose bodies name none. Raises ApiError 400."""
    names = await gateway.models.serving(api.task, key)
    if len(names) != 1:
        served = f"one of {', '.join(names)}" if names else "no model serves this path"
        raise invalid(f"model must be given: add ?model=NAME to the path ({served})", param="model")
    return names[0]


def _queue_options(
    body: PoolingBody, model: str, key: ApiKey, headers: CallHeaders, api: PoolingApi
) -> Mapping[str, Any]:
    asked = body.priority if headers.priority is None else headers.priority
    options: dict[str, Any] = {
        "model": model,
        "tenant": key.tenant,
        "key_name": key.name,
        "priority": bounded_priority(asked, key),
        "expires": headers.expires,
        "abandon_after": headers.abandon_after,
    }
    if headers.idempotency_key is not None:
        options["idempotency_key"] = f"{api.prefix.rstrip('-')}:{key.name}:{headers.idempotency_key}"
    return options


async def _submit(
    gateway: Gateway, key: ApiKey, call: WholeCall, headers: CallHeaders, model: RegisteredModel
) -> list[str]:
    """Count the tokens and bytes of the messages, then submit them.

    Raises ApiError 429 if their key has used its budget, or if their tenant has no room.
    """
    size = sum(encoded_bytes(each.request.to_kwargs()) for each in call.submissions)
    tokens: dict[str, int] = {}
    if key.tokens_per_day is not None:
        tokens = {each.request_id: most_tokens(each.request, model.max_model_len) for each in call.submissions}
    item = call.submissions[0].request_id
    names = [each.headers.get("idempotency_key") for each in call.submissions]
    async with gateway.budgets.reserved(key, model.name, tokens, headers.expires, names) as sending:
        try:
            await gateway.stored.admit(key.name, key.tenant, item, size, int(headers.expires))
            sending.has_begun = True
            sending.accepted = request_ids = await gateway.client.submit_pooling(call.submissions)
        except REFUSALS:  # after any other error the messages may still be in the queue
            await _uncount(gateway, key, item)
            raise
    if request_ids[0] != item:  # an earlier request had the Idempotency-Key
        await _uncount(gateway, key, item)
    return request_ids


async def _uncount(gateway: Gateway, key: ApiKey, item: str) -> None:
    with suppress(*REDIS_ERRORS):  # without Redis, the count expires later by itself
        await asyncio.shield(gateway.stored.change(key.name, key.tenant, item, 0, 0))


async def _answered(
    gateway: Gateway,
    key: ApiKey,
    api: PoolingApi,
    body: PoolingBody,
    call: WholeCall,
    request_ids: list[str],
    headers: CallHeaders,
) -> Response:
    """Wait for the rows, charge their tokens to the key, and write the answer."""
    has_ended, pooled = False, None
    is_shared = headers.idempotency_key is not None  # another call may read the answer
    try:
        async with (
            open_pooled_reader(gateway.hub, body, call, request_ids) as reader,
            gateway.limits.charging(key, request_ids[0], lambda: reader.num_tokens),
        ):
            try:
                pooled = await pooled_of(reader, headers.expires)
            finally:
                has_ended = reader.has_ended
    finally:
        if pooled is None and not is_shared:
            await asyncio.shield(cancel_all(gateway.client, request_ids))
        if has_ended or not is_shared:
            await _uncount(gateway, key, request_ids[0])
    if is_shared:
        with suppress(*REDIS_ERRORS):  # without Redis, these streams are not counted
            await gateway.stored.count_streams(key.name, key.tenant, request_ids, gateway.envelopes.result_ttl)
    else:
        gateway.read.add(request_ids)
    told = {"x-headrace-id": request_ids[0]}
    if isinstance(pooled, Pooled) and pooled.truncated:
        told["x-headrace-truncated"] = header_of([*map(str, pooled.truncated)])
    return JsonResponse(body.answer(pooled, f"{api.prefix}{request_ids[0]}"), headers=told)


def routes_of(api: PoolingApi, *paths: str) -> list[Route]:
    async def endpoint(request: Request) -> Response:
        return await create(request, api)

    return [Route(path, endpoint, methods=["POST"]) for path in paths]


routes: Final = [
    *routes_of(EMBEDDINGS, "/v1/embeddings", "/embeddings"),
    *routes_of(COHERE_EMBED, "/v2/embed"),
    *routes_of(COHERE_EMBED_V1, "/v1/embed"),
    *routes_of(RERANK, "/v2/rerank", "/v1/rerank", "/rerank"),
    *routes_of(SCORE, "/v1/score", "/score"),
    *routes_of(CLASSIFY, "/v1/classify", "/classify"),
    *routes_of(TEI_EMBED, "/embed"),
    *routes_of(TEI_PREDICT, "/predict"),
]
