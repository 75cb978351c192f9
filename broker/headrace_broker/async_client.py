"""The client for asyncio. `client.py` has the client for threads."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Final, Self, Unpack

from headrace_broker.call_rules import BEGINNING, check_last_ids, check_request_id, check_timeout
from headrace_broker.client import READ_RETRIES, Client, unavailable, wait_seconds
from headrace_broker.connections import connect_async
from headrace_broker.dead_letters import DeadLetter
from headrace_broker.errors import ResultTimeoutError, StreamExpiredError
from headrace_broker.events import ChunkEvent, StreamEvent
from headrace_broker.keys import result_key, stream_key
from headrace_broker.listeners import get_abandon_after, read_abandon_after, send_heartbeat
from headrace_broker.queue_levels import QueueLevels
from headrace_broker.queue_purge import PurgedMessages
from headrace_broker.registry import RegisteredModel
from headrace_broker.results import GenerateResult
from headrace_broker.settings import BrokerSettings
from headrace_broker.streams import END_STREAM
from headrace_broker.submission import (
    STREAM_STATUS,
    RequestStatus,
    SubmitOptions,
    SubmitRequest,
    cancel_call,
    chunk_of,
    read_result,
    read_status,
    was_cancelled,
)
from headrace_broker.subscriber import read_stream_async, read_streams_async


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
        self._redis: Final = connect_async(self.settings.redis_url, retries=READ_RETRIES)
        self._end: Final = self._redis.register_script(END_STREAM.text)
        self._status: Final = self._redis.register_script(STREAM_STATUS.text)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._redis.aclose()
        await asyncio.to_thread(self._client.close)

    async def submit(
        self,
        prompt: str | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        **options: Unpack[SubmitOptions],
    ) -> str:
        """See `Client.submit`."""
        return await asyncio.to_thread(self._client.submit, prompt, sampling_params, **options)

    async def submit_many(self, requests: Iterable[SubmitRequest]) -> list[str]:
        """See `Client.submit_many`."""
        return await asyncio.to_thread(self._client.submit_many, requests)

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

    async def cancel(self, request_id: str) -> bool:
        """See `Client.cancel`."""
        check_request_id(request_id)
        with unavailable(self.settings, "cancel a request"):
            return was_cancelled(await self._end(**cancel_call(request_id, self.settings.result_ttl_seconds)))

    async def is_known(self, request_id: str) -> bool | None:
        """See `Client.is_known`."""
        return await asyncio.to_thread(self._client.is_known, request_id)

    async def status(self, request_id: str) -> RequestStatus:
        """See `Client.status`."""
        check_request_id(request_id)
        with unavailable(self.settings, "read the status of a request"):
            return read_status(await self._status(keys=STREAM_STATUS.keys(stream=stream_key(request_id))))

    async def queue_levels(self, models: Iterable[str]) -> dict[str, QueueLevels]:
        """See `Client.queue_levels`."""
        return await asyncio.to_thread(self._client.queue_levels, models)

    async def queue_tenants(self, models: Iterable[str]) -> dict[str, dict[str, int]]:
        """See `Client.queue_tenants`."""
        return await asyncio.to_thread(self._client.queue_tenants, models)

    async def dead_letters(self, limit: int = 1000) -> list[DeadLetter]:
        """See `Client.dead_letters`."""
        return await asyncio.to_thread(self._client.dead_letters, limit)

    async def requeue_dead_letters(self, letters: Iterable[DeadLetter]) -> list[DeadLetter]:
        """See `Client.requeue_dead_letters`."""
        return await asyncio.to_thread(self._client.requeue_dead_letters, letters)

    async def purge_dead_letters(self, letters: Iterable[DeadLetter]) -> int:
        """See `Client.purge_dead_letters`."""
        return await asyncio.to_thread(self._client.purge_dead_letters, letters)

    async def purge_queue(self, model: str | None = None) -> PurgedMessages:
        """See `Client.purge_queue`."""
        return await asyncio.to_thread(self._client.purge_queue, model)

    async def models(self) -> dict[str, RegisteredModel]:
        """See `Client.models`."""
        return await asyncio.to_thread(self._client.models)
