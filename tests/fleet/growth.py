"""`make fleet-growth`: what one request and one chunk cost Redis, by queued messages, tenants, models and readers."""

import argparse
import asyncio
import itertools
import multiprocessing
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import redis
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fleet.workers import cpu_seconds
from headrace_broker import Client
from headrace_broker.app import make_app
from headrace_broker.keys import queue_lists, queue_name
from headrace_broker.queue.leased_message import LeasedMessage
from headrace_broker.queue.leases import Leases
from headrace_broker.server.connections import connect, connect_async
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.settings import BrokerSettings
from headrace_broker.streams.hub import StreamHub
from headrace_broker.streams.subscriber import read_stream_async
from headrace_broker.streams.writer import StreamWrite, StreamWriter

PARTS = ("sort", "fetch", "claim", "end", "result", "ack")
_TENANT, _MODEL = "t00000", "m000"
_MEASURED = 1200
_RESULT = {"choices": [{"text": "a", "token_ids": [1], "finish_reason": "stop"}]}
_AT_ONCE = 4
"""Messages of a fetch: the default of --fetch-quantum."""
_PUSHED_AT_ONCE = 1000
_STREAM_SECONDS = 600
_STEP_SECONDS = 0.025
_READER_START_SECONDS = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fleet.growth", description=__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=[100, 10_000, 1_000_000], help="queued messages")
    parser.add_argument("--tenants", type=int, nargs="+", default=[10, 1000, 10_000], help="among 10,000 messages")
    parser.add_argument("--models", type=int, nargs="+", default=[1, 100], help="with 100 messages each")
    parser.add_argument("--seconds", type=float, default=4.0, help="for which chunks are written")
    options = parser.parse_args()
    console = Console(width=150)
    cases = [
        *[(depth, 10, 1) for depth in options.depths],
        *[(10_000, tenants, 1) for tenants in options.tenants],
        *[(100 * models, 10, models) for models in options.models],
    ]
    table = Table("queued", "tenants", "models", *PARTS, "a request", "bytes a message", title="us of Redis a request")
    for queued, tenants, models in dict.fromkeys(cases):
        spent, size = requests(queued, tenants, models)
        costs = [f"{spent[part]:.0f}" for part in PARTS]
        table.add_row(f"{queued:,}", str(tenants), str(models), *costs, f"{sum(spent.values()):.0f}", f"{size:.0f}")
    console.print(table)
    readers = [("none", 0), ("hub", 1), ("hub", 4), ("one each", 0)]
    titles = [kind if kind != "hub" else f"{count} hub{'s' * (count > 1)}" for kind, count in readers]
    table = Table("streams a step", *titles, title="us of Redis a chunk, by readers")
    for streams in (1, 8, 64):
        table.add_row(str(streams), *[f"{chunks(streams, *each, options.seconds):.1f}" for each in readers])
    console.print(table)


def requests(queued: int, tenants: int, models: int) -> tuple[Mapping[str, float], float]:
    """Return the microseconds of Redis of each part of a request, and the bytes of Redis of a message that waits."""
    with EmbeddedServer(environ={}, password=False) as server, connect(server.url) as client:
        queues = [queue_name(f"m{index:03d}") for index in range(models)]
        messages = _messages(server.url, client, tenants)
        leases = Leases(client, lease_seconds=60, delivery_limit=5)
        before = client.info("memory")["used_memory"]
        with Progress(transient=True) as progress:
            for queue in progress.track(queues, description=f"{queued:,} messages, {tenants} tenants"):
                _fill(client, leases, queue, queued // models, messages)
        size = (client.info("memory")["used_memory"] - before) / queued
        return _serve(server.url, client, leases, queues, messages), size


def _messages(url: str, client: "redis.Redis", tenants: int) -> Iterator[bytes]:
    """Yield messages like the one that the client sends, each of its own id, of one tenant after the other."""
    with Client(url, model=_MODEL) as producer:
        sent = producer.submit("x" * 600, {"max_tokens": 64}, tenant=_TENANT)
    raw = client.rpop(queue_lists(queue_name(_MODEL))[0])
    assert isinstance(raw, bytes)
    client.flushall()
    assert sent.encode() in raw
    assert _TENANT.encode() in raw
    for index in itertools.count():
        request_id, tenant = str(uuid.UUID(int=index, version=4)), f"t{index % tenants:05d}"
        yield raw.replace(sent.encode(), request_id.encode()).replace(_TENANT.encode(), tenant.encode())


def _fill(client: "redis.Redis", leases: Leases, queue: str, count: int, messages: Iterator[bytes]) -> None:
    lists = queue_lists(queue)
    while count:
        some = list(itertools.islice(messages, min(count, _PUSHED_AT_ONCE)))
        client.lpush(lists[0], *some)
        count -= len(some)
        _sort(client, leases, queue)


def _serve(
    url: str, client: "redis.Redis", leases: Leases, queues: list[str], messages: Iterator[bytes]
) -> dict[str, float]:
    """Send more requests and serve as many: in turns through the queues, so that the queues keep their lengths."""
    settings = BrokerSettings.from_env({"HEADRACE_REDIS_URL": url})
    backend = make_app(settings, worker=True, models=[_MODEL]).backend
    writer, spent = StreamWriter(client, _STREAM_SECONDS), dict.fromkeys(PARTS, 0.0)
    each = _MEASURED // len(queues)
    for queue in queues:
        client.lpush(queue_lists(queue)[0], *itertools.islice(messages, each))
    with _timed(client, spent, "sort"):
        for queue in queues:
            _sort(client, leases, queue)
    leased: list[LeasedMessage] = []
    with _timed(client, spent, "fetch"):
        for queue, missing in itertools.product(queues, range(each, 0, -_AT_ONCE)):
            leased += leases.fetch(queue_lists(queue), min(_AT_ONCE, missing))
    ids = [str(message.bound_id) for message in leased]
    with _timed(client, spent, "claim"):
        for request_id in ids:
            writer.claim(request_id, "worker", content="c")
    with _timed(client, spent, "end"):
        for request_id in ids:
            writer.publish([StreamWrite.end(request_id, 1, 0, finish_reason="stop")])
    with _timed(client, spent, "result"):
        for request_id in ids:
            backend.store_result(request_id, _RESULT, "SUCCESS")
    for message in leased:
        leases.hold(message.lease_id, message)
        leases.cost(message.lease_id, 65)
    with _timed(client, spent, "ack"):
        for message in leased:
            leases.ack(message.lease_id)
    assert len(leased) == each * len(queues), (len(leased), each)
    return {part: seconds / len(leased) * 1e6 for part, seconds in spent.items()}


def _sort(client: "redis.Redis", leases: Leases, queue: str) -> None:
    lists = queue_lists(queue)
    while client.llen(lists[0]):
        leases.sort(lists)


@contextmanager
def _timed(client: "redis.Redis", spent: dict[str, float], part: str) -> Iterator[None]:
    started = cpu_seconds(client)
    read = cpu_seconds(client) - started  # what reading this costs
    yield
    spent[part] += cpu_seconds(client) - started - 2 * read


def chunks(streams: int, reader: str, hubs: int, seconds: float) -> float:
    """Return the microseconds of Redis of a chunk, in steps that write one chunk to each of so many streams."""
    with EmbeddedServer(environ={}, password=False) as server, connect(server.url) as client:
        writer = StreamWriter(client, _STREAM_SECONDS)
        ids = [str(uuid.UUID(int=index, version=4)) for index in range(streams)]
        for request_id in ids:
            writer.claim(request_id, "worker", content="c")
        parts = [ids[first::hubs] for first in range(hubs)] if reader == "hub" else [ids] if reader != "none" else []
        read = _read_by_hub if reader == "hub" else _read_each
        processes = [multiprocessing.Process(target=_run, args=(read, server.url, part)) for part in parts if part]
        for process in processes:
            process.start()
        time.sleep(_READER_START_SECONDS)
        started, begun, steps = cpu_seconds(client), time.monotonic(), 0
        while (due := begun + steps * _STEP_SECONDS) < begun + seconds:
            time.sleep(max(0.0, due - time.monotonic()))
            steps += 1
            writer.publish([StreamWrite.chunk(each, 1, steps, index=0, token_ids=[1], text=" word") for each in ids])
        time.sleep(_STEP_SECONDS)  # the readers take the last chunks
        spent = cpu_seconds(client) - started
        writer.publish([StreamWrite.end(request_id, 1, steps, finish_reason="stop") for request_id in ids])
        for process in processes:
            process.join()
        return spent / (steps * streams) * 1e6


def _run(read: Callable[[str, list[str]], Coroutine[Any, Any, None]], url: str, ids: list[str]) -> None:
    asyncio.run(read(url, ids))


async def _read_by_hub(url: str, ids: list[str]) -> None:
    async with connect_async(url) as client:
        hub = StreamHub(client)
        async with hub.subscribe(dict.fromkeys(ids, "0-0")) as subscription:
            while subscription.request_ids:
                await subscription.take(5.0)
        await hub.aclose()


async def _read_each(url: str, ids: list[str]) -> None:
    """Read each stream by a connection of its own, as programs in other languages do."""

    async def read(request_id: str) -> None:
        async with connect_async(url) as client:
            async for _ in read_stream_async(client, request_id):
                pass

    await asyncio.gather(*map(read, ids))


if __name__ == "__main__":
    main()
