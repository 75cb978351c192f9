"""Sends a checked pooling call as messages and waits for their rows. It knows no HTTP."""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from headrace_broker import AsyncClient, QueueUnavailableError, RequestFailedError, StreamExpiredError
from headrace_broker.client.decision_calls import WholeCall, checked_decision_call
from headrace_broker.client.pooling_calls import pooling_call
from headrace_broker.decisions import Decided, DecideRequest
from headrace_broker.pooling_results import Pooled
from headrace_broker.streams.events import EndEvent, StartEvent
from headrace_broker.streams.hub import StreamHub, Subscription
from headrace_gateway.answers.reader import LATE_SECONDS
from headrace_gateway.errors import ApiError
from headrace_gateway.http.broker_errors import api_error_of, api_error_of_end
from headrace_gateway.keys.api_key import ApiKey
from headrace_gateway.pooling.pooling_body import CUT_END, PoolingBody
from headrace_wire.codes import ErrorCode

_FIELD: Final = re.compile(
    r"\b(input|questions|documents|queries|query|max_tokens|dimensions|prompt_name)\b(?:\[(\d+)\])?"
)
_ABOUT_FIELDS: Final = (ErrorCode.INVALID_REQUEST, ErrorCode.CONTEXT_LENGTH_EXCEEDED)


def call_of(body: PoolingBody, options: Mapping[str, Any], key: ApiKey) -> WholeCall:
    """Return the messages of a call.

    Args:
        options: fields of `QueueOptions`; `model` is required.
    """
    if body.task == "decide":
        # `read_decision` has checked it, for a large body in another process
        request = DecideRequest(**body.given, lora=body.options["lora"])
        own = {"prefix_key": body.options["prefix_key"], "cache_salt": key.cache_salt}
        return checked_decision_call(request, {**options, **own}, [], None)
    return pooling_call(body.task, body.inputs, {**body.queue_options, **options}, None)


class PooledReader:
    """Reads the rows, or the answers, of submitted messages for one client."""

    def __init__(
        self,
        body: PoolingBody,
        call: WholeCall,
        request_ids: Sequence[str],
        subscription: Subscription,
    ) -> None:
        self._body: Final = body
        self._answer: Final = call.answer(request_ids)
        self._firsts: Final = dict(zip(request_ids, call.firsts, strict=True))
        self._subscription: Final = subscription
        self._tokens: Final[dict[str, int]] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens of the messages that a worker has begun."""
        return sum(self._tokens.values())

    @property
    def has_ended(self) -> bool:
        return not self._subscription.request_ids

    async def take(self, timeout: float | None) -> bool:
        """Take the rows that have arrived; False if none arrive within `timeout` seconds.

        Raises ApiError if a message fails or expires, and StreamExpiredError if its stream is gone.
        """
        events = await self._subscription.take(timeout)
        for request_id, event in events:
            if isinstance(event, StartEvent):
                self._tokens[request_id] = event.prompt_tokens or 0
            elif isinstance(event, EndEvent) and event.usage is not None:
                self._tokens[request_id] = event.usage.prompt_tokens
            try:
                self._answer.add(request_id, event)
            except RequestFailedError as error:
                raise _failure(error, self._body, self._firsts[request_id]) from None
        return bool(events)

    def whole(self) -> Pooled | Decided:
        """Return the answer of all messages. Call it when all have ended."""
        return self._answer.whole()


@asynccontextmanager
async def open_pooled_reader(
    hub: StreamHub, body: PoolingBody, call: WholeCall, request_ids: Sequence[str]
) -> AsyncIterator[PooledReader]:
    """Open the streams of messages, given in the order of `call.submissions`, at their first entries."""
    async with hub.subscribe(dict.fromkeys(request_ids, "0-0")) as subscription:
        yield PooledReader(body, call, request_ids, subscription)


async def pooled_of(reader: PooledReader, seconds: float) -> Pooled | Decided:
    """Wait for the rows of all messages.

    Args:
        seconds: the deadline of the messages, from now.

    Raises ApiError if one of the messages fails or expires.
    """
    deadline = time.monotonic() + seconds + LATE_SECONDS
    while not reader.has_ended:
        try:
            has_more = await reader.take(max(0.0, deadline - time.monotonic()))
        except StreamExpiredError as error:
            raise api_error_of(error) from None
        if not has_more and time.monotonic() >= deadline:
            raise api_error_of_end(ErrorCode.EXPIRED, "no worker answered the request before its deadline")
    return reader.whole()


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
    failure = api_error_of_end(error.code, message)
    field = _FIELD.search(error.message) if error.code in _ABOUT_FIELDS else None
    if field is not None:
        param = named(field)
    elif body.task == "decide" and error.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED:
        param = "input"
    else:
        return failure
    return ApiError(failure.status, failure.kind, failure.code, message, param=param, headers=failure.headers)
