"""Sends the requests of one batch line, or attaches to them if they were sent before, and reads them to their end."""

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import redis

from headrace_broker import (
    AsyncClient,
    BrokerSettings,
    HeadraceBrokerError,
    QueueFullError,
    QueueUnavailableError,
    RegisteredModel,
    StreamExpiredError,
    UnknownModelError,
)
from headrace_broker.errors import MalformedEntryError, UsedRequestIdError
from headrace_broker.server.connections import connect_async
from headrace_broker.server.stream_servers import AsyncStreamServers
from headrace_broker.streams.hub import StreamHub
from headrace_gateway.background_task import check_cancelled
from headrace_gateway.batch.due_times import DueTimes
from headrace_gateway.batch.line import BatchLine, LineReader
from headrace_gateway.batch.line_call import LineCall, WholeAnswer, line_call
from headrace_gateway.errors import ApiError
from headrace_gateway.http.broker_errors import NO_RETRY, REFUSALS, api_error_of
from headrace_gateway.keys.api_key import ApiKey
from headrace_gateway.keys.daily_budgets import DailyBudgets
from headrace_gateway.keys.model_catalog import ModelCatalog
from headrace_gateway.requests.body_process import BodyProcess
from headrace_gateway.requests.token_bound import most_tokens
from headrace_wire.codes import BatchCode, ErrorCode, GatewayCode
from headrace_wire.errors import CopyableError

_LOST_LIMIT: Final = 3
"""Number of times that a line is sent if its stream disappears before it is read."""
_LONGEST_PAUSE: Final = 10.0
_LONGEST_RESEND: Final = 3600.0
_NO_DEADLINE: Final = 86_400.0
"""Seconds for which tokens are reserved if the batch has no deadline: a budget is that of a day."""

Value = TypeVar("Value")


class LineAnswer(NamedTuple):
    """The line for the output file or the error file."""

    line: bytes
    is_success: bool
    usage: Mapping[str, Any] | None = None
    """The `usage` of a success, as in its body."""
    request_ids: Sequence[str] = ()
    """The ids of all requests that were made for the line."""


class LineStoppedError(Exception):
    """The line has no answer: its batch was stopped, or its deadline has passed."""


class _AnswerLostError(CopyableError):
    """The stream expired before it was read."""

    def __init__(self, *, was_sent: bool) -> None:
        super().__init__()
        self.was_sent = was_sent
        """Whether this run sent the request. Otherwise it attached to a request that was sent before."""


class _QuotaError(Exception):
    """A worker refused the request: the tenant had too many in the queue."""


class LineRequests:
    """Sends the lines of one batch.

    Args:
        hub: must retry for as long as Redis is unavailable.
        secret: the secret of the batch. All request ids are derived from it, so a replica that resumes the batch finds
            the requests again.
        key: the owner of the requests. A body may ask for a lower priority than the key's `best_priority`.
        deadline: Unix seconds after which the queue drops unanswered requests; None: never.
        due_times: when the lines should be answered; None: as soon as possible.
        on_waiting: called with the reason each time that a line cannot be sent.
        bodies: reads the large lines; None: this process reads them.
        pause: seconds before a failed send is retried.
        resend_after: seconds without output after which a request is sent again, in case Redis has lost it. The wait
            doubles with each repeat.
    """

    def __init__(
        self,
        client: AsyncClient,
        hub: StreamHub,
        models: ModelCatalog,
        *,
        secret: str,
        key: ApiKey,
        deadline: float | None = None,
        due_times: DueTimes | None = None,
        on_waiting: Callable[[str], None],
        bodies: BodyProcess | None = None,
        pause: float = 1.0,
        resend_after: float = 60.0,
    ) -> None:
        self._client: Final = client
        self._budgets: Final = DailyBudgets(client)
        self._hub: Final = hub
        self._models: Final = models
        self._secret: Final = secret
        self._key: Final = key
        self._reader: Final = LineReader(bodies, key)
        self._deadline: Final = deadline
        self._due_times: Final = due_times
        self._on_waiting: Final = on_waiting
        self._pause: Final = pause
        self._resend_after: Final = resend_after
        self._running: Final[set[tuple[str, ...]]] = set()
        self._is_stopped = False

    async def stop(self) -> None:
        """Cancel the open requests. Answered lines keep their answers; every other line raises LineStoppedError.

        Raises QueueUnavailableError if Redis is unavailable. Even then, no more requests are sent.
        """
        self._is_stopped = True
        for request_ids in list(self._running):
            for request_id in request_ids:
                await self._client.cancel(request_id)

    async def answer(self, line: BatchLine) -> LineAnswer:
        """Wait for the answer of a line, whether it is a success or an error, without a time limit.

        Raises QueueUnavailableError, redis-py's NoPermissionError if the Redis user lacks a right, and LineStoppedError
        after `stop` and after the deadline.
        """
        attempt = num_lost = 0
        due = None if self._due_times is None else self._due_times.next()
        request_ids: list[str] = []
        while True:
            self._check_stopped()
            try:
                answer = await self._answer(line, self.answer_id(line, attempt), due, request_ids)
                return answer._replace(request_ids=request_ids)
            except _QuotaError:
                await asyncio.sleep(10 * self._pause)
                attempt += 1
            except _AnswerLostError as lost:
                num_lost += lost.was_sent
                if num_lost == _LOST_LIMIT:
                    message = f"the request was sent {num_lost} times, and its stream was lost each time"
                    return LineAnswer(line.unanswered(BatchCode.ANSWER_LOST, message), False, request_ids=request_ids)
                attempt += 1
            except redis.RedisError as error:  # such as out of memory or read-only; the retry has the same id
                if isinstance(error, redis.exceptions.NoPermissionError):
                    raise
                check_cancelled()
                self._on_waiting(f"Redis refuses: {error}")
                await asyncio.sleep(self._pause)

    async def _answer(self, line: BatchLine, answer_id: str, due: float | None, made: list[str]) -> LineAnswer:
        try:
            answer, ignored = await self._ask(line, answer_id, due, made)
            return LineAnswer(
                line.answered(200, answer_id, answer.body, ignored, answer.truncated), True, answer.body.get("usage")
            )
        except MalformedEntryError as error:
            return LineAnswer(line.unanswered(BatchCode.UNREADABLE_ANSWER, str(error)), False)
        except QueueUnavailableError:
            raise
        except HeadraceBrokerError as error:
            refused = api_error_of(error)
        except ApiError as error:
            refused = error
        if refused.code == ErrorCode.QUOTA_EXCEEDED:
            raise _QuotaError
        is_end_of_batch = self._is_stopped if refused.code == ErrorCode.CANCELLED else self._deadline
        if refused.code in (ErrorCode.CANCELLED, ErrorCode.EXPIRED) and is_end_of_batch:
            raise LineStoppedError
        return LineAnswer(line.answered(refused.status, answer_id, refused.body()), False)

    def _check_stopped(self) -> None:
        if self._is_stopped or (self._deadline is not None and time.time() > self._deadline):
            raise LineStoppedError

    def answer_id(self, line: BatchLine, attempt: int) -> str:
        """Return the id of the answer and of its request: the same in every run that reaches this attempt."""
        digest = hashlib.blake2b(f"{line.id}/{attempt}".encode(), key=self._secret.encode(), digest_size=16)
        return f"{line.api.prefix}{digest.hexdigest()}"

    async def _ask(
        self, line: BatchLine, answer_id: str, due: float | None, made: list[str]
    ) -> tuple[WholeAnswer, Collection[str]]:
        """Return the answer, and the fields of the request that were ignored."""
        model, lora = await self._retrying(partial(self._models.find, line.model, self._key, line.task))
        checked = await self._reader.call(line, model, lora)
        call = line_call(checked, line.api, answer_id, model.name, self._key, deadline=self._deadline, due=due)
        request_ids = tuple(call.request_ids)
        made += [request_id for request_id in request_ids if request_id not in made]
        self._running.add(request_ids)
        try:
            return await self._read(call, model), checked.ignored
        except ApiError:
            for request_id in request_ids if len(request_ids) > 1 else ():  # nothing waits for the other requests
                await self._retrying(partial(self._client.cancel, request_id))
            raise
        finally:
            self._running.discard(request_ids)

    async def _read(self, call: LineCall, model: RegisteredModel) -> WholeAnswer:
        """Send the requests and read the answer. The queue drops a second message with the same id."""
        resend_after = self._resend_after
        async with call.open(self._hub) as reading:
            was_sent = await self._send(call, model)
            while not reading.has_ended:
                try:
                    has_more = await reading.take(resend_after)
                except StreamExpiredError:
                    raise _AnswerLostError(was_sent=was_sent) from None
                if not has_more:
                    resend_after = min(2 * resend_after, _LONGEST_RESEND)
                    await self._send(call, model)
        return reading.whole()

    async def _send(self, call: LineCall, model: RegisteredModel) -> bool:
        """Send the requests, except those that run or have ended. Return whether any was sent.

        Raises ApiError 429 if the key has used its budget.
        """
        num_sent = 0
        for number, (request_id, request) in enumerate(zip(call.request_ids, call.requests, strict=True)):
            made: Collection[str] = ()
            if self._key.tokens_per_day is not None:
                status = await self._retrying(partial(self._client.status, request_id))
                if status.state != "pending":  # an earlier holder of the claim sent it, so it needs no budget
                    continue
                tokens = {request_id: most_tokens(request, model.max_model_len)}
                seconds = _NO_DEADLINE if self._deadline is None else max(0.0, self._deadline - time.time())
                made = await self._retrying(partial(self._budgets.reserve, self._key, model.name, tokens, seconds))
            num_sent += await self._send_one(call, number, model.name, made)
        return num_sent > 0

    async def _send_one(self, call: LineCall, number: int, model: str, reserved: Collection[str]) -> bool:
        """Send one request; False if it runs or has ended. It keeps its reservation if it may be in the queue."""
        may_be_queued = False

        async def send() -> None:
            nonlocal may_be_queued
            try:
                await call.send(self._client, number)
            except QueueUnavailableError:  # the reply may be lost
                may_be_queued = True
                raise

        try:
            await self._retrying(send)
        except (LineStoppedError, *REFUSALS) as error:
            if not may_be_queued:
                await self._budgets.release(self._key, model, reserved)
            if isinstance(error, UsedRequestIdError):  # an earlier holder of the claim sent it
                return False
            raise
        return True

    async def _retrying(self, act: Callable[[], Awaitable[Value]]) -> Value:
        """Retry until the queue has room, Redis is available, and the models are registered again.

        A send whose reply was lost is repeated with the same id.
        """
        while True:
            pause = self._pause
            self._check_stopped()
            try:
                return await act()
            except QueueFullError as error:
                self._on_waiting("the queue is full")
                pause = min(error.retry_after_seconds or pause, _LONGEST_PAUSE)
            except QueueUnavailableError as error:
                if isinstance(error.__cause__, redis.exceptions.NoPermissionError):
                    raise
                self._on_waiting(str(error))
            except UnknownModelError as error:
                self._on_waiting(str(error))
            except ApiError as error:
                if error.code == ErrorCode.MODEL_NOT_FOUND:
                    self._on_waiting("the model is not registered; its workers register it within a minute")
                elif error.code == GatewayCode.INSUFFICIENT_QUOTA and not NO_RETRY.items() <= error.headers.items():
                    self._on_waiting(error.message)
                else:
                    raise
            check_cancelled()
            await asyncio.sleep(pause)


@asynccontextmanager
async def patient_hub(broker: BrokerSettings) -> AsyncIterator[StreamHub]:
    """Open a hub that waits for as long as Redis is unavailable."""
    connection = connect_async(broker.redis_url)
    streams = AsyncStreamServers.connected(connection, *broker.stream_servers)
    hub = StreamHub(streams, max_outage_seconds=math.inf)
    try:
        yield hub
    finally:
        await hub.aclose()
        await streams.aclose()
        await connection.aclose()
