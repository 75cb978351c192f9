"""The client for asyncio. `client.py` has the client for threads."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar, Unpack

from headrace_broker.call_rules import BEGINNING, check_last_ids, check_request_id, check_timeout
from headrace_broker.client.client import READ_RETRIES, Client, unavailable, wait_seconds
from headrace_broker.client.decision_calls import DecideOptions, decision_call
from headrace_broker.client.pooling_calls import (
    EmbedOptions,
    Inputs,
    PairInputs,
    PoolingCall,
    ScoreOptions,
    check_top_n,
    pooling_call,
    score_call,
)
from headrace_broker.client.submission import (
    STREAM_STATUS,
    RequestStatus,
    cancel_call,
    chunk_of,
    read_result,
    read_status,
    was_cancelled,
)
from headrace_broker.decisions import Decided
from headrace_broker.errors import ResultTimeoutError, StreamExpiredError
from headrace_broker.keys import result_key, stream_key
from headrace_broker.pooling_results import Pooled, RankedDocument, ranking_of
from headrace_broker.results import GenerateResult
from headrace_broker.server.connections import connect_async
from headrace_broker.settings import BrokerSettings
from headrace_broker.streams.events import ChunkEvent, StreamEvent
from headrace_broker.streams.listeners import get_abandon_after, read_abandon_after, send_heartbeat
from headrace_broker.streams.subscriber import read_stream_async, read_streams_async
from headrace_broker.streams.writer import END_STREAM

P = ParamSpec("P")
T = TypeVar("T")


def _in_thread(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate["AsyncClient", P], Coroutine[Any, Any, T]]:
    """Return a coroutine function that runs the method in a thread."""

    @wraps(method)
    async def call(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(method, self._client, *args, **kwargs)

    return call


class AsyncClient:
    """`Client` with coroutines and asynchronous iterators. It belongs to one event loop. Call `aclose` at the end."""

    def __init__(
        self,
        broker: str | BrokerSettings | None = None,
        *,
        model: str | None = None,
        check_model: bool = True,
        tracer_provider: Any = None,
    ) -> None:
        # kombu cannot publish asynchronously, so a Client in a thread submits; it also runs the less frequent calls
        self._client: Final = Client(broker, model=model, check_model=check_model, tracer_provider=tracer_provider)
        self.settings: Final = self._client.settings
        self._model: Final = model
        self._redis: Final = connect_async(self.settings.redis_url, retries=READ_RETRIES)
        self._end: Final = self._redis.register_script(END_STREAM.text)
        self._status: Final = STREAM_STATUS.bound(self._redis)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._redis.aclose()
        await asyncio.to_thread(self._client.close)

    submit = _in_thread(Client.submit)
    submit_many = _in_thread(Client.submit_many)
    is_known = _in_thread(Client.is_known)
    queue_levels = _in_thread(Client.queue_levels)
    queue_tenants = _in_thread(Client.queue_tenants)
    dead_letters = _in_thread(Client.dead_letters)
    requeue_dead_letters = _in_thread(Client.requeue_dead_letters)
    purge_dead_letters = _in_thread(Client.purge_dead_letters)
    purge_queue = _in_thread(Client.purge_queue)
    models = _in_thread(Client.models)

    async def stream(
        self, request_id: str, *, last_id: str | None = BEGINNING, timeout: float | None = None
    ) -> AsyncIterator[ChunkEvent]:
        """See `Client.stream`."""
        async for event in self.events(request_id, last_id=last_id, timeout=timeout):
            if (chunk := chunk_of(request_id, event)) is not None:
                yield chunk

    async def events(
        self, request_id: str, *, last_id: str | None = BEGINNING, timeout: float | None = None
    ) -> AsyncIterator[StreamEvent]:
        """See `Client.events`."""
        with unavailable(self.settings, "read a stream"):
            span = self._client.tracing.receiving(check_request_id(request_id))
            try:
                async for event in read_stream_async(self._redis, request_id, last_id=last_id, timeout=timeout):
                    span.record(event)
                    yield event
            finally:
                span.close()

    async def events_many(
        self, request_ids: Iterable[str] | Mapping[str, str | None], *, timeout: float | None = None
    ) -> AsyncIterator[tuple[str, StreamEvent | StreamExpiredError]]:
        """See `Client.events_many`."""
        with unavailable(self.settings, "read streams"):
            async for item in read_streams_async(self._redis, check_last_ids(request_ids), timeout=timeout):
                yield item

    async def result(self, request_id: str, timeout: float | None = None) -> GenerateResult:
        """See `Client.result`."""
        key = result_key(check_request_id(request_id))
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        abandon_after: float | None = None
        with unavailable(self.settings, "wait for a result"):
            async with self._redis.pubsub() as pubsub:
                await pubsub.subscribe(key)
                while True:
                    async with self._redis.pipeline(transaction=False) as pipe:
                        pipe.get(key)
                        get_abandon_after(pipe, request_id)
                        meta, listener = await pipe.execute()
                        if isinstance(meta, bytes) and (result := read_result(request_id, meta)) is not None:
                            return result
                        abandon_after = read_abandon_after(listener) or abandon_after
                        if abandon_after is not None:
                            send_heartbeat(pipe, request_id)
                            await pipe.execute()
                    left = wait_seconds(deadline, abandon_after)
                    if left <= 0:
                        raise ResultTimeoutError(request_id, timeout or 0, "result")
                    await pubsub.get_message(timeout=left)

    async def embed(self, texts: Inputs, *, timeout: float | None = None, **options: Unpack[EmbedOptions]) -> Pooled:
        """See `Client.embed`."""
        return await self._pool(pooling_call("embed", {"input": texts}, options, self._model), timeout)

    async def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        timeout: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Pooled:
        """See `Client.score`."""
        return await self._pool(score_call(query, documents, options, self._model), timeout)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        timeout: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> list[RankedDocument]:
        """See `Client.rerank`."""
        check_top_n(top_n)
        return ranking_of((await self.score(query, documents, timeout=timeout, **options)).rows.tolist(), top_n)

    async def classify(
        self, inputs: PairInputs, *, timeout: float | None = None, **options: Unpack[ScoreOptions]
    ) -> Pooled:
        """See `Client.classify`."""
        return await self._pool(pooling_call("classify", {"input": inputs}, options, self._model), timeout)

    async def decide(
        self,
        given: str | Sequence[Mapping[str, Any]],
        questions: Sequence[Mapping[str, Any]],
        *,
        timeout: float | None = None,
        **options: Unpack[DecideOptions],
    ) -> Decided:
        """See `Client.decide`."""
        call = decision_call(given, questions, options, self._model)
        answer = call.answer(await self.submit_pooling(call.submissions))
        async for request_id, event in self.events_many(answer.request_ids, timeout=timeout):
            answer.add(request_id, event)
        return answer.whole()

    submit_pooling = _in_thread(Client.submit_pooling)

    async def _pool(self, call: PoolingCall, timeout: float | None) -> Pooled:
        answer = call.answer(await self.submit_pooling(call.submissions))
        async for request_id, event in self.events_many(answer.request_ids, timeout=timeout):
            answer.add(request_id, event)
        return answer.whole()

    async def cancel(self, request_id: str) -> bool:
        """See `Client.cancel`."""
        check_request_id(request_id)
        with unavailable(self.settings, "cancel a request"):
            return was_cancelled(await self._end(**cancel_call(request_id, self.settings.result_ttl_seconds)))

    async def status(self, request_id: str) -> RequestStatus:
        """See `Client.status`."""
        check_request_id(request_id)
        with unavailable(self.settings, "read the status of a request"):
            return read_status(await self._status(stream=stream_key(request_id)))
