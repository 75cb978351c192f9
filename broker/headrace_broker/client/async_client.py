"""The client for asyncio. `client.py` has the client for threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Self, TypeVar, Unpack

import redis.asyncio

from headrace_broker.call_rules import BEGINNING, check_last_id, check_last_ids, check_request_id, check_timeout
from headrace_broker.client.client import READ_RETRIES, Client
from headrace_broker.client.submission import (
    STREAM_STATUS,
    RequestStatus,
    cancel_call,
    cancelled_in_advance,
    chunk_of,
    read_result,
    read_status,
    was_cancelled,
)
from headrace_broker.client.unavailable import unavailable
from headrace_broker.errors import ResultTimeoutError, StreamExpiredError
from headrace_broker.keys import LISTENER_SECONDS, listener_key, result_key, stream_key
from headrace_broker.results import GenerateResult
from headrace_broker.server.asking_homes import (
    AwayHomes,
    ask_homes_async,
    at_most_briefly,
    unless_away_async,
)
from headrace_broker.server.connections import connect_async
from headrace_broker.server.shards import id_in_keys
from headrace_broker.server.stream_servers import AsyncStreamServers
from headrace_broker.server.stream_table import MAIN
from headrace_broker.settings import BrokerSettings
from headrace_broker.streams.events import ChunkEvent, StreamEvent
from headrace_broker.streams.following import follow
from headrace_broker.streams.hub import StreamHub
from headrace_broker.streams.listeners import get_abandon_after, read_abandon_after, wait_seconds
from headrace_broker.streams.subscriber import read_streams_async
from headrace_broker.streams.writer import END_STREAM

if TYPE_CHECKING:
    from headrace_broker.client.decision_calls import DecideOptions
    from headrace_broker.client.pooling_calls import EmbedOptions, Inputs, PairInputs, PoolingCall, ScoreOptions
    from headrace_broker.decisions import Decided
    from headrace_broker.pooling_results import Pooled, RankedDocument

P = ParamSpec("P")
T = TypeVar("T")


def _in_thread(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Return a coroutine function that runs the method in a thread."""

    @wraps(method)
    async def call(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
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
        self._streams: Final = AsyncStreamServers.connected(
            self._redis, *self.settings.stream_servers, retries=READ_RETRIES
        )
        self._hub: StreamHub | None = None
        """Reads streams if they are on several servers."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        if self._hub is not None:
            await self._hub.aclose()
        await self._streams.aclose()
        await self._redis.aclose()
        await asyncio.to_thread(self._client.close)

    submit = _in_thread(Client.submit)
    submit_many = _in_thread(Client.submit_many)
    is_known = _in_thread(Client.is_known)
    queue_levels = _in_thread(Client.queue_levels)
    queue_tenants = _in_thread(Client.queue_tenants)
    usage = _in_thread(Client.usage)
    reserve_tokens = _in_thread(Client.reserve_tokens)
    release_tokens = _in_thread(Client.release_tokens)
    bound_requests = _in_thread(Client.bound_requests)
    dead_letters = _in_thread(Client.dead_letters)
    requeue_dead_letters = _in_thread(Client.requeue_dead_letters)
    purge_dead_letters = _in_thread(Client.purge_dead_letters)
    purge_queue = _in_thread(Client.purge_queue)
    models = _in_thread(Client.models)
    loading_models = _in_thread(Client.loading_models)

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
                async for _, event in self._read_streams({request_id: last_id}, timeout):
                    if isinstance(event, StreamExpiredError):
                        raise event
                    span.record(event)
                    yield event
            finally:
                span.close()

    async def events_many(
        self, request_ids: Iterable[str] | Mapping[str, str | None], *, timeout: float | None = None
    ) -> AsyncIterator[tuple[str, StreamEvent | StreamExpiredError]]:
        """See `Client.events_many`."""
        with unavailable(self.settings, "read streams"):
            async for item in self._read_streams(check_last_ids(request_ids), timeout):
                yield item

    async def _read_streams(
        self, last_ids: Mapping[str, str | None], timeout: float | None
    ) -> AsyncIterator[tuple[str, StreamEvent | StreamExpiredError]]:
        for request_id in last_ids:
            await self._streams.homes(request_id)  # raises SettingsError if a stream server has no URL
        if self._streams.is_single:
            events = read_streams_async(self._redis, last_ids, timeout=timeout)
        else:
            self._hub = self._hub or StreamHub(self._streams)
            checked = {request_id: check_last_id(last_id) for request_id, last_id in last_ids.items()}
            events = follow(self._hub, checked, timeout)
        async for item in events:
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
                    abandon_after = await self._send_heartbeat(request_id, listener) or abandon_after
                    left = wait_seconds(deadline, abandon_after)
                    if left <= 0:
                        raise ResultTimeoutError(request_id, timeout or 0, "result")
                    await pubsub.get_message(timeout=left)

    async def _send_heartbeat(self, request_id: str, on_main: bytes | None) -> float | None:
        """See `Client._send_heartbeat`."""
        found = None
        for home in await self._streams.homes(request_id):
            async with unless_away_async(home):
                server = await self._streams.of(home)
                value: Any = on_main if home == MAIN else await server.get(listener_key(id_in_keys(home, request_id)))
                if (abandon_after := read_abandon_after(value)) is not None:
                    found = abandon_after
                    await server.expire(listener_key(id_in_keys(home, request_id)), LISTENER_SECONDS)
        return found

    async def embed(self, texts: Inputs, *, timeout: float | None = None, **options: Unpack[EmbedOptions]) -> Pooled:
        """See `Client.embed`."""
        from headrace_broker.client.pooling_calls import pooling_call

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
        from headrace_broker.client.pooling_calls import score_call

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
        from headrace_broker.client.pooling_calls import check_top_n
        from headrace_broker.pooling_results import ranking_of

        check_top_n(top_n)
        return ranking_of((await self.score(query, documents, timeout=timeout, **options)).rows.tolist(), top_n)

    async def classify(
        self, inputs: PairInputs, *, timeout: float | None = None, **options: Unpack[ScoreOptions]
    ) -> Pooled:
        """See `Client.classify`."""
        from headrace_broker.client.pooling_calls import pooling_call

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
        from headrace_broker.client.decision_calls import decision_call

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
            ttl_seconds = self.settings.result_ttl_seconds
            homes = await self._streams.homes_now(request_id)
            if len(homes) > 1:  # an end at another server than that of the stream would be an answer of its own
                found_at = await self._statuses(homes, request_id, "cancel a request")
                homes = [home for home, reply in found_at.items() if not cancelled_in_advance(reply)] or homes
            away, found = AwayHomes(self._streams, "cancel a request"), []
            for home in homes:  # all of them, also after one that had ended in another way
                with away.noted(home):
                    async with at_most_briefly(home):
                        end = (await self._streams.of(home)).register_script(END_STREAM.text)
                        found.append(await end(**cancel_call(request_id, ttl_seconds, home)))
            away.check()
            return all(map(was_cancelled, found))

    async def status(self, request_id: str) -> RequestStatus:
        """See `Client.status`."""
        check_request_id(request_id)
        with unavailable(self.settings, "read the status of a request"):
            homes = await self._streams.homes_now(request_id)
            found = await self._statuses(homes, request_id, "read the status of a request", first=True)
            return read_status(next(iter(found.values()), None))

    async def _statuses(
        self, homes: Sequence[str], request_id: str, action: str, *, first: bool = False
    ) -> dict[str, Any]:
        """See `Client._statuses`."""

        async def ask(home: str, server: redis.asyncio.Redis) -> Any:
            return await STREAM_STATUS.bound(server)(stream=stream_key(id_in_keys(home, request_id)))

        return await ask_homes_async(self._streams, homes, ask, action, first=first)
