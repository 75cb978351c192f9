"""`AsyncClient` does what `Client` does."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis

from headrace_broker import (
    AsyncClient,
    Client,
    GenerateResult,
    QueueUnavailableError,
    RequestFailedError,
    RequestStatus,
    ResultTimeoutError,
    StreamExpiredError,
    make_app,
)
from headrace_broker.keys import queue_lists, queue_name, stream_key
from headrace_broker.models.registry import register_model
from headrace_broker.queue.leases import Leases
from headrace_broker.results import ChoiceOutput
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.streams.writer import StreamWrite, StreamWriter
from headrace_wire.codes import DeadLetterReason
from service.servers import make_server


@pytest.fixture
async def client(redis_server: EmbeddedServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(redis_server.url, model="m") as client:
        yield client


@pytest.fixture
def writer(redis_client: "redis.Redis") -> StreamWriter:
    return StreamWriter(redis_client, 60)


async def test_subscribers_wait_without_blocking_the_event_loop(client: AsyncClient, writer: StreamWriter) -> None:
    async def follow(request_id: str) -> list[str]:
        return [chunk.text async for chunk in client.stream(request_id, timeout=10)]

    ids = [await client.submit("x"), *await client.submit_many([{"prompt": "y"}])]
    readers = [asyncio.create_task(follow(request_id)) for request_id in ids]
    for request_id in ids:
        writer.claim(request_id, "w")
        writer.publish([StreamWrite.chunk(request_id, 1, 1, index=0, token_ids=[1], text="tok")])
        writer.publish([StreamWrite.end(request_id, 1, 1, finish_reason="stop")])
    assert await asyncio.gather(*readers) == [["tok"], ["tok"]]


async def test_several_hundred_streams_are_read_at_once(
    client: AsyncClient, writer: StreamWriter, redis_client: "redis.Redis"
) -> None:
    ids = [f"r{number}" for number in range(300)]
    for request_id in ids:
        writer.claim(request_id, "w")

    async def last_id(request_id: str) -> str:
        return [event.entry_id async for event in client.events(request_id, timeout=60)][-1]

    readers = asyncio.gather(*map(last_id, ids))
    while redis_client.info("clients")["blocked_clients"] < len(ids) and not readers.done():
        await asyncio.sleep(0.01)
    writer.publish([StreamWrite.end(request_id, 1, 0, finish_reason="stop") for request_id in ids])
    assert await readers == ["1-1"] * len(ids)


async def test_a_reader_that_is_cancelled_when_an_entry_arrives_ends(client: AsyncClient, writer: StreamWriter) -> None:
    async def follow(request_id: str) -> None:
        async for _ in client.events(request_id, timeout=60):
            pass

    for turns in range(24):  # of the event loop: one of them is between a command and its reply
        request_id = f"r{turns}"
        writer.claim(request_id, "w")
        reader = asyncio.create_task(follow(request_id))
        await asyncio.sleep(0.01)
        writer.publish([StreamWrite.chunk(request_id, 1, 1, index=0, token_ids=[1], text="tok")])
        for _ in range(turns // 2):
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.wait([reader], timeout=10)
        assert reader.cancelled(), f"{turns // 2} turns after the entry"


async def test_a_stream_is_resumed(client: AsyncClient, writer: StreamWriter) -> None:
    writer.claim("r", "w")
    writer.publish([StreamWrite.chunk("r", 1, n, index=0, token_ids=[n], text=str(n)) for n in (1, 2)])
    writer.publish([StreamWrite.end("r", 1, 2, finish_reason="stop")])
    assert [chunk.text async for chunk in client.stream("r", last_id="1-1")] == ["2"]
    assert [event.entry_id async for event in client.events("r")] == ["1-0", "1-1", "1-2", "1-3"]


async def test_requests_report_their_status_and_are_cancelled(client: AsyncClient) -> None:
    assert await client.status("r") == RequestStatus("pending")
    assert await client.cancel("r")
    assert await client.status("r") == RequestStatus("finished", 1, 0, "cancelled")
    with pytest.raises(RequestFailedError, match="cancelled"):
        _ = [chunk async for chunk in client.stream("r")]


@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")  # Celery's own
async def test_result_waits_until_the_worker_stores_it(client: AsyncClient) -> None:
    result = GenerateResult("r", [ChoiceOutput(0, "hi", [7], finish_reason="stop")])
    worker = make_app(client.settings)
    waiting = asyncio.create_task(client.result("r", timeout=10))
    await asyncio.to_thread(worker.backend.store_result, "r", result.to_wire(), "SUCCESS")
    assert await waiting == result
    worker.close()
    with pytest.raises(ResultTimeoutError):
        await client.result("unknown", timeout=0.01)


def test_it_has_every_method_of_client() -> None:
    def methods(kind: type) -> set[str]:
        return {name for name in dir(kind) if callable(getattr(kind, name)) and not name.startswith("_")}

    assert methods(AsyncClient) - {"aclose"} == methods(Client) - {"close"}


async def test_dead_letters_are_listed_requeued_and_purged(client: AsyncClient, redis_client: "redis.Redis") -> None:
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=5)
    for request_id in "ab":
        await client.submit("x", request_id=request_id)
        [message] = leases.fetch(queue_lists(queue_name("m")), 1)
        leases.dead_letter(message.lease_id, DeadLetterReason.POISON, "killed")
    newest, oldest = await client.dead_letters()
    assert [(letter.request_id, letter.reason) for letter in (newest, oldest)] == [
        ("b", "poison: killed"),
        ("a", "poison: killed"),
    ]
    assert await client.requeue_dead_letters([newest]) == [newest]
    assert await client.purge_dead_letters([newest, oldest]) == 1
    assert await client.dead_letters() == []


async def test_an_expired_stream_raises(client: AsyncClient, redis_client: "redis.Redis") -> None:
    await client.cancel("r")
    redis_client.delete(stream_key("r"))
    with pytest.raises(StreamExpiredError):
        _ = [chunk async for chunk in client.stream("r")]


async def test_models_are_listed(client: AsyncClient, redis_client: "redis.Redis") -> None:
    register_model(redis_client, "m", max_model_len=8, worker="w", seen=1)
    assert (await client.models())["m"].max_model_len == 8


async def test_an_unreachable_server_is_named() -> None:
    with make_server() as server:
        url = server.url
    async with AsyncClient(url, model="m") as client:
        with pytest.raises(QueueUnavailableError, match=url):
            await client.status("r")
