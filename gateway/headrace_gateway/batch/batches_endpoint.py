"""`/v1/batches`: create, read, list and cancel the batches of an API key."""

import secrets
import shutil
import time
from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_gateway.batch.batch_record import ENDED, LONGEST_WINDOW, BatchRecord, window_seconds
from headrace_gateway.batch.batch_store import BatchStore
from headrace_gateway.batch.batch_work import keep_input
from headrace_gateway.batch_line import ENDPOINTS
from headrace_gateway.body import read_json
from headrace_gateway.context import gateway_of, key_of
from headrace_gateway.errors import ApiError, invalid
from headrace_gateway.files.file_threads import in_file_thread
from headrace_gateway.files.files_endpoint import files_of, find, find_room, keeps_too_much, storage_error
from headrace_gateway.files.stored_files import KEPT_SECONDS
from headrace_gateway.files.upload import LEAST_SECONDS, MOST_SECONDS
from headrace_gateway.json_response import JsonResponse
from headrace_gateway.object_list import object_list, read_limit
from headrace_gateway.problems import Problems, shown

FIELDS: Final = frozenset({"input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"})
MOST_LISTED: Final = 100
_LISTED: Final = 20
MOST_PAIRS, MOST_NAME, MOST_VALUE = 16, 64, 512


async def create(request: Request) -> Response:
    """`POST /v1/batches`."""
    files, store, key = files_of(request), _store(request), key_of(request)
    body = await read_json(request, gateway_of(request).settings.max_body_bytes)
    _check(body)
    file, path = await find(files, key, body["input_file_id"])
    if file.bytes > await find_room(files, key, gateway_of(request).settings.max_kept_bytes):
        raise keeps_too_much(gateway_of(request).settings.max_kept_bytes)
    request.scope["state"]["answer_headers"] = await gateway_of(request).limits.admit(key)
    now = int(time.time())
    seconds = window_seconds(body["completion_window"])
    assert seconds is not None
    record = BatchRecord(
        id=f"batch_{secrets.token_hex(16)}",
        key=key.name,
        tenant=key.tenant,
        best_priority=key.best_priority,
        models=None if key.models is None else tuple(sorted(key.models)),
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
        return JsonResponse((await store.create(record)).shape())
    except ApiError:
        await in_file_thread(shutil.rmtree, folder, ignore_errors=True)
        raise


def _check(body: Mapping[str, Any]) -> None:
    """Raise ApiError 400 that lists every problem."""
    problems = Problems()
    problems.unknown_names(body, FIELDS)
    if not isinstance(body.get("input_file_id"), str):
        problems.add("input_file_id", "input_file_id must be the id of a file")
    if body.get("endpoint") not in tuple(ENDPOINTS):
        problems.add("endpoint", f"endpoint must be {' or '.join(ENDPOINTS)}")
    if window_seconds(body.get("completion_window")) is None:
        days = LONGEST_WINDOW // 86_400
        problems.add("completion_window", f"completion_window must be a duration such as 24h or 30m, at most {days}d")
    _check_metadata(body.get("metadata"), problems)
    _check_life(body.get("output_expires_after"), problems)
    problems.raise_any()


def _check_metadata(metadata: object, problems: Problems) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or len(metadata) > MOST_PAIRS:
        problems.add("metadata", f"metadata must be an object of at most {MOST_PAIRS} pairs, not {shown(metadata)}")
    elif any(
        not isinstance(value, str) or len(value) > MOST_VALUE or not 1 <= len(name) <= MOST_NAME
        for name, value in metadata.items()
    ):
        message = f"metadata must have keys of 1 to {MOST_NAME} characters and strings of at most {MOST_VALUE}"
        problems.add("metadata", message)


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
        problems.add("output_expires_after", f"output_expires_after must be {example}")


async def list_batches(request: Request) -> Response:
    """`GET /v1/batches`, newest first."""
    files_of(request)
    limit = read_limit(request.query_params.get("limit"), _LISTED, MOST_LISTED)
    after = request.query_params.get("after")
    found = await _store(request).list(key_of(request), after, limit + 1)
    if found is None:
        raise invalid(f"after must be the id of a batch of this list, not {(after or '')[:80]!r}", param="after")
    shapes = [batch.shape() for batch in found[:limit]]
    return JsonResponse(object_list(shapes, has_more=len(found) > limit))


async def find_batch(request: Request) -> Response:
    """`GET /v1/batches/{id}`."""
    files_of(request)
    return JsonResponse((await _store(request).get(request.path_params["id"], key_of(request))).shape())


async def cancel(request: Request) -> Response:
    """`POST /v1/batches/{id}/cancel`."""
    files_of(request)
    store, key, batch_id = _store(request), key_of(request), request.path_params["id"]
    await store.get(batch_id, key)
    status = await store.cancel(batch_id)
    if status in ENDED - {"cancelled"} or status == "finalizing":
        raise invalid(f"a batch with the status {status} cannot be cancelled", code="not_cancellable")
    return JsonResponse((await store.get(batch_id, key)).shape())


def _store(request: Request) -> BatchStore:
    return gateway_of(request).batches


routes: Final = [
    Route("/v1/batches", list_batches, methods=["GET"]),
    Route("/v1/batches", create, methods=["POST"]),
    Route("/v1/batches/{id}", find_batch, methods=["GET"]),
    Route("/v1/batches/{id}/cancel", cancel, methods=["POST"]),
]
