"""`/v1/batches`: create, read, list and cancel the batches of an API key."""

import secrets
import shutil
import time
from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_gateway.admission import report_ignored
from headrace_gateway.batch.line import ENDPOINTS
from headrace_gateway.batch.record import ENDED, LONGEST_WINDOW, SOONEST, BatchRecord, window_seconds
from headrace_gateway.batch.store import BatchStore
from headrace_gateway.batch.work import keep_input
from headrace_gateway.context import gateway_of, key_of
from headrace_gateway.errors import ApiError, invalid
from headrace_gateway.files.endpoints import files_of, find, find_room, keeps_too_much, storage_error
from headrace_gateway.files.stored_files import KEPT_SECONDS
from headrace_gateway.files.threads import in_file_thread
from headrace_gateway.files.upload import LEAST_SECONDS, MOST_SECONDS
from headrace_gateway.http.json import JsonResponse, object_list, read_limit
from headrace_gateway.requests.body import read_json
from headrace_gateway.requests.call_fields import checked
from headrace_gateway.requests.problems import Problems
from headrace_wire.codes import GatewayCode
from headrace_wire.values import named, shown

FIELDS: Final = frozenset({"input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"})
MOST_LISTED: Final = 100
_LISTED: Final = 20


async def create(request: Request) -> Response:
    """`POST /v1/batches`."""
    files, store, key = files_of(request), _store(request), key_of(request)
    request.scope["state"]["answer_headers"] = await gateway_of(request).limits.admit(key)
    body = await read_json(request)
    report_ignored(request, _check(body))
    file, path = await find(files, key, body["input_file_id"])
    if file.bytes > await find_room(files, key, gateway_of(request).settings.max_kept_bytes):
        raise keeps_too_much(gateway_of(request).settings.max_kept_bytes)
    now = int(time.time())
    seconds = window_seconds(body["completion_window"])
    assert seconds is not None
    record = BatchRecord(
        id=f"batch_{secrets.token_hex(16)}",
        key=key.name,
        tenant=key.tenant,
        best_priority=key.best_priority,
        models=None if key.models is None else tuple(sorted(key.models)),
        tokens_per_day=key.tokens_per_day,
        endpoint=body["endpoint"],
        input_file_id=body["input_file_id"],
        completion_window=body["completion_window"],
        created_at=now,
        expires_at=now + seconds,
        metadata=body.get("metadata"),
        output_seconds=(body.get("output_expires_after") or {}).get("seconds", KEPT_SECONDS),
        secret=secrets.token_hex(16),
    )
    folder = files.batch_folder(key, record.id)
    try:
        await in_file_thread(keep_input, folder, path)
    except OSError as error:
        raise storage_error(error) from error
    try:
        return JsonResponse((await store.create(record)).shape(time.time()))
    except ApiError:
        await in_file_thread(shutil.rmtree, folder, ignore_errors=True)
        raise


def _check(body: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the ignored fields. Raises ApiError 400 that lists every problem."""
    problems = Problems()
    problems.unknown_names(body, FIELDS)
    if not isinstance(body.get("input_file_id"), str):
        problems.must("input_file_id", "be the id of a file", shown(body.get("input_file_id")))
    if body.get("endpoint") not in tuple(ENDPOINTS):
        problems.must("endpoint", f"be {' or '.join(ENDPOINTS)}", named(body.get("endpoint")))
    if window_seconds(body.get("completion_window")) is None:
        days = LONGEST_WINDOW // 86_400
        told = named(body.get("completion_window"))
        problems.must("completion_window", f"be {SOONEST}, or a duration such as 24h or 30m, at most {days}d", told)
    checked(body, "metadata", problems)
    _check_life(body.get("output_expires_after"), problems)
    problems.raise_any()
    return problems.ignored


def _check_life(life: object, problems: Problems) -> None:
    if life is None:
        return
    seconds = life.get("seconds") if isinstance(life, dict) else None
    is_integer = isinstance(seconds, int) and not isinstance(seconds, bool)
    if (
        not isinstance(life, dict)
        or life.keys() != {"anchor", "seconds"}
        or life["anchor"] != "created_at"
        or not is_integer
        or not LEAST_SECONDS <= life["seconds"] <= MOST_SECONDS
    ):
        example = f'{{"anchor": "created_at", "seconds": {LEAST_SECONDS} to {MOST_SECONDS}}}'
        problems.must("output_expires_after", f"be {example}", shown(life))


async def list_batches(request: Request) -> Response:
    """`GET /v1/batches`, newest first."""
    files_of(request)
    limit = read_limit(request.query_params, _LISTED, MOST_LISTED)
    after = request.query_params.get("after")
    found = await _store(request).list(key_of(request), after, limit + 1)
    if found is None:
        raise invalid(f"after must be the id of a batch of this list, got {(after or '')[:80]!r}", param="after")
    shapes = [batch.shape(time.time()) for batch in found[:limit]]
    return JsonResponse(object_list(shapes, has_more=len(found) > limit))


async def find_batch(request: Request) -> Response:
    """`GET /v1/batches/{id}`."""
    files_of(request)
    return JsonResponse((await _store(request).get(request.path_params["id"], key_of(request))).shape(time.time()))


async def cancel(request: Request) -> Response:
    """`POST /v1/batches/{id}/cancel`."""
    files_of(request)
    store, key, batch_id = _store(request), key_of(request), request.path_params["id"]
    await store.get(batch_id, key)
    status = await store.cancel(batch_id)
    if status in ENDED - {"cancelled"} or status == "finalizing":
        raise invalid(f"a batch with the status {status} cannot be cancelled", code=GatewayCode.NOT_CANCELLABLE)
    return JsonResponse((await store.get(batch_id, key)).shape(time.time()))


def _store(request: Request) -> BatchStore:
    store: BatchStore = request.app.state.batches
    return store


routes: Final = [
    Route("/v1/batches", list_batches, methods=["GET"]),
    Route("/v1/batches", create, methods=["POST"]),
    Route("/v1/batches/{id}", find_batch, methods=["GET"]),
    Route("/v1/batches/{id}/cancel", cancel, methods=["POST"]),
]
