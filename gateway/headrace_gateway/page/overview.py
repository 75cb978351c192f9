"""`/headrace/...`: the endpoints of the page and of operators for queues, single requests and dead letters.

No response contains text of a prompt or of an output.
"""

import time
from collections.abc import Collection
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_broker import DeadLetter
from headrace_gateway.answers.envelope import Envelope
from headrace_gateway.context import gateway_of, key_of, require_admin
from headrace_gateway.errors import invalid
from headrace_gateway.generation import count_end
from headrace_gateway.http.broker_errors import not_found, unavailable
from headrace_gateway.http.json import JsonResponse, read_limit
from headrace_gateway.requests.body import read_json
from headrace_wire.request import name_problems

_LETTERS_KEPT: Final = 1000
_SELECTION_BYTES: Final = 2**18
"""Limit for a body with the ids of `_LETTERS_KEPT` dead letters."""
_LETTERS_SHOWN: Final = 100
_OF_ADMINS: Final = frozenset({"by_tenant", "worker"})
_PROBLEM: Final = "no worker gets messages of this queue; an administrator's key shows why"


class LetterSelection(msgspec.Struct, forbid_unknown_fields=True):
    """The dead letters that an administrator has selected."""

    letter_ids: tuple[str, ...]


async def overview(request: Request) -> Response:
    """Return the key's models with the state of their queues; for an admin key also tenants and workers."""
    key = key_of(request)
    queues = [queue for queue in await gateway_of(request).queues.all() if key.may_use(queue["model"])]
    hidden = frozenset() if key.is_admin else _OF_ADMINS
    shown = [{name: value for name, value in queue.items() if name not in hidden} for queue in queues]
    for queue in shown:
        if not key.is_admin and queue["problem"] is not None:  # it names keys and addresses
            queue["problem"] = _PROBLEM
    return JsonResponse({"object": "headrace.overview", "at": time.time(), "is_admin": key.is_admin, "queues": shown})


async def request_status(request: Request) -> Response:
    """Return the state of a request: each of its prompts is one request of the queue."""
    request_id = request.path_params["id"]
    envelope = await _owned(request, request_id)
    client = gateway_of(request).client
    states = []
    for one in envelope.request_ids if envelope else (request_id,):
        status = await client.status(one)
        states.append({"id": one, **{name: getattr(status, name) for name in _STATUS}})
    about = {"model": envelope.model, "created": envelope.created} if envelope else {}
    return JsonResponse({"object": "headrace.request", "id": request_id, **about, "requests": states})


_STATUS: Final = ("state", "attempt", "tokens", "rows", "finish_reason")


async def cancel(request: Request) -> Response:
    """Cancel a request in any state. `cancelled` is false if all its prompts had already ended."""
    request_id = request.path_params["id"]
    envelope = await _owned(request, request_id)
    gateway = gateway_of(request)
    ended = [await gateway.client.cancel(one) for one in (envelope.request_ids if envelope else (request_id,))]
    if envelope is not None:  # perhaps no client reads it to its end
        await count_end(gateway, envelope)
    return JsonResponse({"object": "headrace.request", "id": request_id, "cancelled": any(ended)})


async def list_dead_letters(request: Request) -> Response:
    """Return dead letters, newest first. `limit` is 1 to 1000. `missing` names the servers that are away."""
    require_admin(request, "dead letters")
    limit = read_limit(request.query_params, _LETTERS_SHOWN, _LETTERS_KEPT)
    missing: list[str] = []
    letters = await gateway_of(request).client.dead_letters(limit, on_away=missing.append)
    return JsonResponse({"object": "list", "data": [summary(letter) for letter in letters], "missing": missing})


async def requeue_dead_letters(request: Request) -> Response:
    """Put the selected messages back into the queue. A message whose request is still alive is not moved."""
    require_admin(request, "dead letters")
    chosen = await _chosen(request)
    sent = await gateway_of(request).client.requeue_dead_letters(chosen)
    return JsonResponse({"object": "headrace.dead_letters.requeued", "requeued": [letter.letter_id for letter in sent]})


async def purge_dead_letters(request: Request) -> Response:
    """Delete the selected messages permanently."""
    require_admin(request, "dead letters")
    chosen = await _chosen(request)
    count = await gateway_of(request).client.purge_dead_letters(chosen)
    return JsonResponse({"object": "headrace.dead_letters.purged", "purged": count})


def summary(letter: DeadLetter) -> dict[str, Any]:
    """Return the description of a dead letter, without its message."""
    tenant, enqueued_at = letter.headers.get("tenant"), letter.headers.get("enqueued_at")
    return {
        **letter.summary(),
        # the message is untrusted, and so is every header
        "tenant": None if tenant is None or name_problems("tenant", tenant) else tenant,
        "enqueued_at": enqueued_at if isinstance(enqueued_at, float) else None,
    }


async def _owned(request: Request, request_id: str) -> Envelope | None:
    """Return the envelope of a request of this key; None if an admin key asks for a request of another producer.

    Raises ApiError 404 for any other request, as if it did not exist.
    """
    key, gateway = key_of(request), gateway_of(request)
    if not key.is_admin:
        return await gateway.envelopes.get(request_id, key)
    envelope = await gateway.envelopes.find(request_id)
    if envelope is None and await gateway.client.is_known(request_id) is False:
        raise not_found(f"no request {request_id[:80]!r}: it has expired, or this key does not own it")
    return envelope


async def _chosen(request: Request) -> list[DeadLetter]:
    body = await read_json(request, _SELECTION_BYTES)
    try:
        selection = msgspec.convert(body, LetterSelection)
    except msgspec.ValidationError as error:
        raise invalid(f'the body must be {{"letter_ids": [...]}}: {error}', param="letter_ids") from error
    away: list[str] = []
    letters = await gateway_of(request).client.dead_letters(_LETTERS_KEPT, on_away=away.append)
    if away and not {letter.letter_id for letter in letters}.issuperset(selection.letter_ids):
        raise unavailable()  # the others may be on a server that is away
    return pick(letters, selection.letter_ids)


def pick(letters: Collection[DeadLetter], letter_ids: Collection[str]) -> list[DeadLetter]:
    """Return the dead letters with these ids. Raises ApiError 404 that names the missing ones."""
    by_id = {letter.letter_id: letter for letter in letters}
    missing = [one[:40] for one in letter_ids if one not in by_id]
    if missing:
        raise not_found(f"no such dead letter: {', '.join(missing[:5])}")
    return [by_id[one] for one in dict.fromkeys(letter_ids)]


routes: Final = [
    Route("/headrace/overview", overview),
    Route("/headrace/requests/{id}", request_status),
    Route("/headrace/requests/{id}/cancel", cancel, methods=["POST"]),
    Route("/headrace/dead-letters", list_dead_letters),
    Route("/headrace/dead-letters/requeue", requeue_dead_letters, methods=["POST"]),
    Route("/headrace/dead-letters/purge", purge_dead_letters, methods=["POST"]),
]
