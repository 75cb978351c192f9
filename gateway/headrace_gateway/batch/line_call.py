"""The requests of one checked line, and the reader of the answer that they have together: one class for each kind."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, NamedTuple

import msgspec

from headrace_broker import AsyncClient, StreamExpiredError, SubmitRequest
from headrace_broker.pooling_results import Pooled
from headrace_broker.streams.hub import StreamHub
from headrace_gateway.answers.complete_answer import CompleteAnswer
from headrace_gateway.answers.envelope import Envelope
from headrace_gateway.answers.reader import AnswerReader, open_reader
from headrace_gateway.errors import ApiError
from headrace_gateway.generation import Api
from headrace_gateway.keys.api_key import ApiKey
from headrace_gateway.pooling.answering import PooledReader, call_of, open_pooled_reader
from headrace_gateway.pooling.pooling_body import PoolingApi, PoolingBody
from headrace_gateway.requests.call import Call, with_usage
from headrace_gateway.requests.call_fields import bounded_priority
from headrace_gateway.requests.token_bound import QueueRequest

_FOREVER: Final = 10 * 365 * 86400
"""Expiry in the envelope of a line, in seconds. The batch enforces its own deadline; the reader must not."""


class WholeAnswer(NamedTuple):
    """The answer of a line."""

    body: dict[str, Any]
    truncated: Sequence[int] = ()
    """Indices of the inputs that were cut."""


class LineReading(ABC):
    """Reads the answer of one line."""

    @property
    @abstractmethod
    def has_ended(self) -> bool: ...

    @abstractmethod
    async def take(self, timeout: float) -> bool:
        """Take what has arrived; False if nothing arrives within `timeout` seconds.

        Raises ApiError if a request failed, and StreamExpiredError if its stream is gone.
        """

    @abstractmethod
    def whole(self) -> WholeAnswer:
        """Return the answer. Call it when it has ended."""


class LineCall(ABC):
    """The requests of one line."""

    request_ids: Sequence[str]
    requests: Sequence[QueueRequest]
    """As many as `request_ids`."""

    @abstractmethod
    async def send(self, client: AsyncClient, number: int) -> None:
        """Put the request with this index into the queue."""

    @abstractmethod
    def open(self, hub: StreamHub) -> AbstractAsyncContextManager[LineReading]:
        """Open the streams of the requests at their first entries."""


def line_call(
    checked: Call | PoolingBody,
    api: Api | PoolingApi,
    answer_id: str,
    model: str,
    key: ApiKey,
    *,
    deadline: float | None,
    due: float | None = None,
    now: Callable[[], float] = time.time,
) -> LineCall:
    """Return the requests of a line. Their ids are `answer_id`, `<answer_id>.1` and so on.

    Args:
        api: the API of the line, which has read `checked`.
        model: served name.
        deadline: Unix seconds after which the queue drops the requests; None: never.
        due: Unix seconds at which they should have ended; None: as soon as possible.
    """
    options: SubmitRequest = {
        "model": model,
        "tenant": key.tenant,
        "key_name": key.name,
        "priority": bounded_priority(checked.priority, key),
    }
    times = _Times(deadline, due, now)
    if isinstance(checked, PoolingBody):
        return _WholeCall(checked, options, times, answer_id, key)
    assert isinstance(api, Api)
    return _Generation(checked, api, options, times, Envelope.of(checked, answer_id, key, expires=_FOREVER), key)


class _Times(NamedTuple):
    """Unix seconds, not spans: a line may wait for long until it is sent, and may be sent again."""

    deadline: float | None
    due: float | None
    now: Callable[[], float]

    def options(self) -> SubmitRequest:
        """Return the options of a request that is sent now: spans, as the client refuses times that have passed."""
        options: SubmitRequest = {}
        if self.deadline is not None:
            options["expires"] = max(1.0, self.deadline - self.now())
        if self.due is not None:
            options["due"] = max(1.0, self.due - self.now())
        return options


class _Generation(LineCall):
    """A request for each prompt."""

    def __init__(
        self, call: Call, api: Api, options: SubmitRequest, times: _Times, envelope: Envelope, key: ApiKey
    ) -> None:
        self._api: Final = api
        self._times: Final = times
        self._envelope: Final = msgspec.structs.replace(envelope, options=with_usage(envelope.options))
        self.request_ids = envelope.request_ids
        self.requests = call.requests
        options = {**options, "cache_salt": key.cache_salt, "prefix_key": call.prefix_key}
        self._submissions: Final[list[SubmitRequest]] = [
            {**options, "request": request, "request_id": request_id}
            for request, request_id in zip(call.requests, self.request_ids, strict=True)
        ]

    async def send(self, client: AsyncClient, number: int) -> None:
        await client.submit_many([{**self._submissions[number], **self._times.options()}])

    @asynccontextmanager
    async def open(self, hub: StreamHub) -> AsyncIterator[LineReading]:
        async with open_reader(hub, self._envelope, self._api.stream(self._envelope)) as reader:
            yield _GenerationReading(reader, self._envelope)


class _GenerationReading(LineReading):
    def __init__(self, reader: AnswerReader, envelope: Envelope) -> None:
        self._reader: Final = reader
        self._id: Final = envelope.id
        self._answer: Final = CompleteAnswer(envelope.options)

    @property
    def has_ended(self) -> bool:
        return self._reader.has_ended

    async def take(self, timeout: float) -> bool:
        try:
            chunks = await self._reader.take(timeout)
        except ApiError:  # only a lost stream raises it here
            raise StreamExpiredError(self._id, "0-0") from None
        if self._reader.error is not None:
            raise self._reader.error
        for chunk, _ in chunks or ():
            self._answer.add(chunk)
        return chunks is not None

    def whole(self) -> WholeAnswer:
        return WholeAnswer(self._answer.whole())


class _WholeCall(LineCall):
    """The messages of a pooling call or a decision. A line is divided into the same messages whenever it is read."""

    def __init__(self, body: PoolingBody, options: SubmitRequest, times: _Times, answer_id: str, key: ApiKey) -> None:
        self._body: Final = body
        self._call: Final = call_of(body, {**options, **times.options(), "request_id": answer_id}, key)
        self.request_ids = [each.request_id for each in self._call.submissions]
        self.requests = [each.request for each in self._call.submissions]

    async def send(self, client: AsyncClient, number: int) -> None:
        await client.submit_pooling(self._call.submissions[number : number + 1])

    @asynccontextmanager
    async def open(self, hub: StreamHub) -> AsyncIterator[LineReading]:
        async with open_pooled_reader(hub, self._body, self._call, self.request_ids) as reader:
            yield _PoolingReading(reader, self._body, self.request_ids[0])


class _PoolingReading(LineReading):
    def __init__(self, reader: PooledReader, body: PoolingBody, answer_id: str) -> None:
        self._reader: Final = reader
        self._body: Final = body
        self._id: Final = answer_id

    @property
    def has_ended(self) -> bool:
        return self._reader.has_ended

    async def take(self, timeout: float) -> bool:
        return await self._reader.take(timeout)

    def whole(self) -> WholeAnswer:
        found = self._reader.whole()
        truncated = found.truncated if isinstance(found, Pooled) else ()
        return WholeAnswer(self._body.answer(found, self._id), truncated)
