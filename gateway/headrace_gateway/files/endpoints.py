"""`/v1/files`: upload, list, read and delete the files of an API key."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from headrace_gateway.context import gateway_of, key_of
from headrace_gateway.errors import ApiError, invalid
from headrace_gateway.files.stored_files import (
    KEPT_SECONDS,
    PartialFile,
    StoredFile,
    StoredFiles,
    is_full,
    owner_of,
)
from headrace_gateway.files.threads import file_owner, in_file_thread, start_in_file_thread
from headrace_gateway.files.upload import FORM_BYTES, UploadForm
from headrace_gateway.http.broker_errors import NO_RETRY, not_found
from headrace_gateway.http.json import JsonResponse, page_of
from headrace_gateway.keys.api_key import ApiKey
from headrace_wire.codes import GatewayCode

MOST_LISTED: Final = 10_000
MOST_FILES: Final = 10_000
"""Number of files that one key may have."""
_UPLOAD_SECONDS: Final = 3600.0
_WRITE_BYTES: Final = 2**20
_CHECK_BYTES: Final = 16 * 2**20
"""Bytes of an upload after which the key's storage limit is checked again."""

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)


def files_of(request: Request) -> StoredFiles:
    """Return the directory of files, and set `file_owner` to the caller for this request.

    Raises ApiError 501 if the gateway has no directory.
    """
    key = key_of(request)
    file_owner.set(owner_of(key.name, key.tenant))
    files: StoredFiles | None = request.app.state.files
    if files is None:
        message = "this gateway stores no files: start it with --files DIR, a directory that all replicas share"
        raise ApiError(501, "server_error", GatewayCode.NO_FILES, message, headers=NO_RETRY)
    return files


async def upload(request: Request) -> Response:
    """`POST /v1/files`."""
    files, key, gateway = files_of(request), key_of(request), gateway_of(request)
    form = UploadForm(request.headers.get("content-type", ""))
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        message = "compressed bodies are not supported: send the body without Content-Encoding"
        raise ApiError(415, "invalid_request_error", GatewayCode.UNSUPPORTED_MEDIA_TYPE, message)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > gateway.settings.max_file_bytes + FORM_BYTES:
        raise _too_large(gateway.settings.max_file_bytes)
    request.scope["state"]["answer_headers"] = await gateway.limits.admit(key)
    try:
        async with asyncio.timeout(_UPLOAD_SECONDS):
            return JsonResponse((await _store(request, form, files, key)).shape())
    except TimeoutError:
        message = f"the upload took longer than {_UPLOAD_SECONDS:g} seconds"
        raise ApiError(408, "invalid_request_error", GatewayCode.UPLOAD_TIMEOUT, message) from None
    except ClientDisconnect:
        raise invalid("the connection closed before the whole body arrived") from None
    except OSError as error:
        raise storage_error(error) from error


async def _store(request: Request, form: UploadForm, files: StoredFiles, key: ApiKey) -> StoredFile:
    settings = gateway_of(request).settings
    room = await find_room(files, key, settings.max_kept_bytes)
    body_size = checked_at = 0
    async with _partial(files, key) as partial:
        async for data in _blocks(request, form):
            body_size += len(data)
            if body_size > settings.max_file_bytes:
                raise _too_large(settings.max_file_bytes)
            if body_size > room:
                raise keeps_too_much(settings.max_kept_bytes)
            await in_file_thread(partial.write, data)
            if body_size - checked_at > _CHECK_BYTES:  # other uploads of the key may have finished
                checked_at = body_size
                room = body_size + await find_room(files, key, settings.max_kept_bytes)
        filename, purpose, seconds = form.finish()
        kept_seconds = KEPT_SECONDS if seconds is None else seconds
        return await in_file_thread(partial.finish, filename=filename, purpose=purpose, kept_seconds=kept_seconds)


async def _blocks(request: Request, form: UploadForm) -> AsyncIterator[bytes]:
    """Yield the bytes of the file, about a megabyte at a time. Anything after the form is not read."""
    most = gateway_of(request).settings.max_file_bytes
    parts: list[bytes] = []
    size = body_size = 0
    async for data in request.stream():
        body_size += len(data)
        if body_size > most + FORM_BYTES:  # includes parts without data, and bytes before the first part
            raise _too_large(most)
        form.write(data)
        if part := form.take():
            parts.append(part)
            size += len(part)
        if size >= _WRITE_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
        if form.has_ended:
            break
    yield b"".join(parts)


@contextlib.asynccontextmanager
async def _partial(files: StoredFiles, key: ApiKey) -> AsyncIterator[PartialFile]:
    partial = await in_file_thread(files.begin, key)
    try:
        yield partial
    finally:
        await asyncio.shield(start_in_file_thread(partial.discard))  # completes even if this task is cancelled again


async def find_room(files: StoredFiles, key: ApiKey, most: int) -> int:
    """Return how many more bytes the key may store. Raises ApiError 403 if there are none."""
    size, count = await in_file_thread(files.used, key)
    if size >= most:
        raise keeps_too_much(most)
    if count >= MOST_FILES:
        raise _limit_reached(f"the files of this key must be at most {MOST_FILES}, got {count}: delete some")
    return most - size


async def list_files(request: Request) -> Response:
    """`GET /v1/files`."""
    files, key, query = files_of(request), key_of(request), request.query_params
    found = [file for file in await _in_thread(files.all, key) if query.get("purpose") in (None, file.purpose)]
    shapes = [file.shape() for file in reversed(found)]
    return JsonResponse(page_of(shapes, query, "a file in this list", default=MOST_LISTED, most=MOST_LISTED))


async def find_file(request: Request) -> Response:
    """`GET /v1/files/{id}`."""
    file, _ = await find(files_of(request), key_of(request), request.path_params["id"])
    return JsonResponse(file.shape())


async def read_content(request: Request) -> Response:
    """`GET /v1/files/{id}/content`."""
    file, path = await find(files_of(request), key_of(request), request.path_params["id"])
    try:
        status = await in_file_thread(path.stat)
    except FileNotFoundError:
        raise _no_file(file.id) from None
    return FileResponse(
        path,
        media_type="application/octet-stream",
        filename=file.filename,
        stat_result=status,
        headers={"x-content-type-options": "nosniff", "cache-control": "no-store"},
    )


async def delete_file(request: Request) -> Response:
    """`DELETE /v1/files/{id}`. A batch keeps its own copy of its input."""
    files, file_id = files_of(request), request.path_params["id"]
    if not await _in_thread(files.delete, key_of(request), file_id):
        raise _no_file(file_id)
    return JsonResponse({"id": file_id, "object": "file", "deleted": True})


async def find(files: StoredFiles, key: ApiKey, file_id: str) -> Any:
    """Return the metadata and the path of a file of this key. Raises ApiError 404."""
    found = await _in_thread(files.find, key, file_id)
    if found is None:
        raise _no_file(file_id)
    return found


async def _in_thread(act: Any, *args: Any) -> Any:
    try:
        return await in_file_thread(act, *args)
    except OSError as error:
        raise storage_error(error) from error


def storage_error(error: OSError) -> ApiError:
    """Map a disk error to an HTTP error: 507 if the disk is full, else 503."""
    logger.warning("files directory failed", reason=error.strerror)
    if is_full(error):
        message = "the gateway's disk is full: nothing was stored"
        return ApiError(507, "server_error", GatewayCode.STORAGE_FULL, message, headers=NO_RETRY)
    message = "the gateway's directory of files cannot be used; try again"
    return ApiError(503, "server_error", GatewayCode.STORAGE_UNAVAILABLE, message, headers={"retry-after": "5"})


def _no_file(file_id: str) -> ApiError:
    return not_found(f"no file {file_id[:80]!r}: it has expired, or this key does not own it")


def _too_large(most: int) -> ApiError:
    message = f"the file must be at most {most} bytes"
    headers = {"connection": "close"}
    return ApiError(413, "invalid_request_error", GatewayCode.REQUEST_TOO_LARGE, message, param="file", headers=headers)


def keeps_too_much(most: int) -> ApiError:
    return _limit_reached(f"the files of this key may take {most} bytes in total: delete some")


def _limit_reached(message: str) -> ApiError:
    headers = {"connection": "close"}
    return ApiError(403, "permission_error", GatewayCode.STORAGE_LIMIT_EXCEEDED, message, param="file", headers=headers)


routes: Final = [
    Route("/v1/files", list_files, methods=["GET"]),
    Route("/v1/files", upload, methods=["POST"]),
    Route("/v1/files/{id}", find_file, methods=["GET"]),
    Route("/v1/files/{id}", delete_file, methods=["DELETE"]),
    Route("/v1/files/{id}/content", read_content, methods=["GET"]),
]
