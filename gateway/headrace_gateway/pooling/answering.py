"""Sends a checked pooling call as messages and waits for their rows. It knows no HTTP."""

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from headrace_broker import AsyncClient, QueueUnavailableError, RequestFailedError, StreamExpiredError
from headrace_broker.client.pooling_calls import PoolingCall, pooling_call
from headrace_broker.pooling_results import Pooled
from headrace_broker.streams.events import EndEvent
from headrace_broker.streams.hub import StreamHub
from headrace_gateway.answers.reader import LATE_SECONDS
from headrace_gateway.errors import ApiError
from headrace_gateway.http.broker_errors import api_error_of, api_error_of_end
from headrace_gateway.pooling.pooling_body import CUT_END, PoolingBody
from headrace_wire.codes import ErrorCode

_FIELD: Final = re.compile(r"\b(input|documents|queries|query|max_tokens)\b(?:\[(\d+)\])?")


def call_of(body: PoolingBody, options: Mapping[str, Any]) -> PoolingCall:
    """Return the messages of a call.

    Args:
        options: fields of `QueueOptions`; `model` is required.
    """
    return pooling_call(body.task, body.inputs, {**body.queue_options, **options}, None)


async def pooled_of(
    hub: StreamHub,
    body: PoolingBody,
    call: PoolingCall,
    request_ids: Sequence[str],
    *,
    seconds: float | None = None,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> Pooled:
    """Wait for the rows of submitted messages, given in the order of `call.submissions`.

    Args:
        seconds: the deadline of the messages, from now; None: wait without a limit.
        on_tokens: called with the tokens of each message that has ended.

    Raises ApiError if one of the messages fails or expires.
    """
    answer = call.answer(request_ids)
    firsts = dict(zip(request_ids, call.firsts, strict=True))
    deadline = None if seconds is None else time.monotonic() + seconds + LATE_SECONDS
    async with hub.subscribe(dict.fromkeys(request_ids, "0-0")) as subscription:
        while subscription.request_ids:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            events = await subscription.take(left)
            if not events and left is not None and time.monotonic() >= (deadline or 0):
                raise api_error_of_end(ErrorCode.EXPIRED, "no worker answered the request before its deadline")
            for request_id, event in events:
                if isinstance(event, EndEvent) and event.usage is not None:
                    on_tokens(event.usage.prompt_tokens)
                try:
                    answer.add(request_id, event)
                except RequestFailedError as error:
                    raise _failure(error, body, firsts[request_id]) from None
                except StreamExpiredError as error:
                    raise api_error_of(error) from None
    return answer.pooled()


async def cancel_all(client: AsyncClient, request_ids: Sequence[str]) -> None:
    """Cancel the messages that have not ended. Without Redis, they end when nobody has read them for a while."""
    with contextlib.suppress(QueueUnavailableError):
        await asyncio.gather(*(client.cancel(request_id) for request_id in request_ids))


def _failure(error: RequestFailedError, body: PoolingBody, first: int) -> ApiError:
    """Translate a worker's error. It counts the inputs of its message and has the queue's names of fields."""

    def named(found: re.Match[str]) -> str:
        name = body.names.get(found[1], found[1])
        return name if found[2] is None else f"{name}[{int(found[2]) + first}]"

    message = _FIELD.sub(named, error.message).replace(CUT_END, body.names.get(CUT_END, CUT_END))
    field = _FIELD.search(error.message) if error.code == ErrorCode.INVALID_REQUEST else None
    inputs = "documents" if body.task == "score" else "input"
    failure = api_error_of_end(error.code, message, prompt_field=body.names.get(inputs, inputs))
    if field is None or failure.param is not None:
        return failure
    return ApiError(failure.status, failure.kind, failure.code, message, param=named(field), headers=failure.headers)
