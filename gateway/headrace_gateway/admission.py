"""The first steps of every endpoint that takes a body: the key's limits, the body, and the fields without effect."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext

from starlette.requests import Request

from headrace_gateway.context import gateway_of, key_of
from headrace_gateway.requests.body import SMALL_BYTES, Body, read_bytes
from headrace_gateway.requests.problems import header_of, refusal_of


@asynccontextmanager
async def admitted_body(request: Request) -> AsyncIterator[Body]:
    """Take one request from the key's limits, then read the body. The body stays in memory until the block ends.

    At most one large body of a key is in such a block; the next one waits.

    Raises ApiError 400, 413, 415 or 429.
    """
    gateway, key = gateway_of(request), key_of(request)
    request.scope["state"]["answer_headers"] = await gateway.limits.admit(key)
    with gateway.body_bytes.room(key.name) as take:
        raw = await read_bytes(request, gateway.settings.max_body_bytes, take)
        async with gateway.bodies.turn(key.name) if len(raw) > SMALL_BYTES else nullcontext():
            body = Body(raw, gateway.bodies, key)
            del raw
            try:
                yield body
            finally:
                body.close()


def report_ignored(request: Request, ignored: Mapping[str, str]) -> None:
    """Name the ignored fields in a header of the answer. Raises ApiError 400 if the gateway is strict.

    Args:
        ignored: see `Problems.ignored`.
    """
    if not ignored:
        return
    if gateway_of(request).settings.strict:
        raise refusal_of(ignored)
    request.scope["state"]["ignored"] = header_of(list(ignored))
