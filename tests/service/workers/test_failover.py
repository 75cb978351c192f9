"""The master is killed under load. Sentinels promote its replica, and clients and workers see only a pause."""

import asyncio
import re
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import redis

from headrace_broker.client.async_client import AsyncClient
from headrace_broker.client.client import Client
from headrace_broker.errors import QueueUnavailableError
from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import free_port
from headrace_broker.streams.events import ChunkEvent
from headrace_cli.exporter import Exporter
from service.sentinels import SentinelSite
from service.servers import EVERY_PROGRAM
from service.workers.service import DEADLINE, Service, StreamLog
from service.workers.worker_process import WorkerProcess

pytestmark = pytest.mark.rotated_file

TOKENS = 1200
REQUESTS = 4


class Subscriber:
    """Follows one request on a thread of its own, from before its first token.

    If a failover takes longer than clients wait, as on a slow machine, it reads on after its last entry.
    """

    def __init__(self, url: str, request_id: str, *, in_loop: bool) -> None:
        self.request_id = request_id
        self.token_ids: list[int] = []
        self.error: BaseException | None = None
        self._last_id = "0-0"
        self._url = url
        self._follow = self._follow_in_loop if in_loop else self._follow_here
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        deadline = time.monotonic() + 2 * DEADLINE
        try:
            while True:
                try:
                    return self._follow()
                except QueueUnavailableError:
                    if time.monotonic() > deadline:
                        raise
        except BaseException as error:  # noqa: BLE001  # `result` raises it
            self.error = error

    def _take(self, chunk: ChunkEvent) -> None:
        self.token_ids += chunk.token_ids
        self._last_id = chunk.entry_id

    def _follow_here(self) -> None:
        with Client(self._url, model="tiny") as client:
            for chunk in client.stream(self.request_id, last_id=self._last_id, timeout=DEADLINE):
                self._take(chunk)

    def _follow_in_loop(self) -> None:
        async def follow() -> None:
            async with AsyncClient(self._url, model="tiny") as client:
                async for chunk in client.stream(self.request_id, last_id=self._last_id, timeout=DEADLINE):
                    self._take(chunk)

        asyncio.run(follow())

    def result(self) -> list[int]:
        self._thread.join(2 * DEADLINE)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.token_ids


@dataclass(frozen=True)
class Site:
    sentinels: SentinelSite
    service: Service
    worker: WorkerProcess
    client: Client
    undisturbed: list[list[int]]
    """Token ids of each request of `generate` without a failover."""


@pytest.fixture(scope="module", params=EVERY_PROGRAM)
def site(request: pytest.FixtureRequest, model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        sentinels = stack.enter_context(SentinelSite(tmp_path_factory.mktemp("sentinels"), program=request.param))
        service = Service(sentinels.master(), model_folder, tmp_path_factory.mktemp("failover"))
        stack.callback(service.close)
        worker = service.start_worker(redis_url=sentinels.url, lease_seconds=5).wait_ready()
        client = stack.enter_context(Client(sentinels.url, model="tiny"))
        results = [client.result(one, timeout=DEADLINE) for one in generate(client)]
        yield Site(sentinels, service, worker, client, [result.outputs[0].token_ids for result in results])


def generate(client: Client) -> list[str]:
    params = {"max_tokens": TOKENS, "temperature": 0.8, "ignore_eos": True}
    return client.submit_many(
        {"prompt": "the wheel", "sampling_params": {**params, "seed": seed}} for seed in range(REQUESTS)
    )


def submit_without_master(client: Client) -> str:
    """Submit a request and wait for the next master, for several timeouts of the client on a slow machine."""
    params, key = {"max_tokens": 5, "ignore_eos": True}, uuid.uuid4().hex
    deadline = time.monotonic() + DEADLINE
    while True:
        try:
            return client.submit("sent while there is no master", params, idempotency_key=key)
        except QueueUnavailableError:
            if time.monotonic() > deadline:
                raise


def wait_tokens(server: "redis.Redis", service: Service, request_ids: list[str], more: int) -> None:
    """Wait until each stream has so many tokens more than now."""
    for request_id in request_ids:
        wanted = StreamLog.read(server, request_id).num_tokens + more
        service.wait_until(lambda: StreamLog.read(server, request_id).num_tokens >= wanted, DEADLINE)  # noqa: B023


@pytest.mark.parametrize("replica", ["in step", "behind"])
def test_readers_senders_and_running_requests_continue_with_the_next_master(site: Site, replica: str) -> None:
    sentinels, client, service = site.sentinels, site.client, site.service
    sentinels.wait_watched()
    ids = generate(client)
    subscribers = [Subscriber(sentinels.url, one, in_loop=bool(number % 2)) for number, one in enumerate(ids)]
    old = sentinels.master()
    with connect(old.url) as server:
        wait_tokens(server, service, ids, 20)
        if replica == "behind":  # it stops replicating, so entries that the master accepts from now on are lost
            with connect(sentinels.replica().url) as other:
                other.replicaof("127.0.0.1", free_port())
            wait_tokens(server, service, ids, 50)
    old.kill()
    waiting = submit_without_master(client)
    new = sentinels.wait_failed_over(old)
    elections = sentinels.elections()

    for subscriber, token_ids in zip(subscribers, site.undisturbed, strict=True):
        assert subscriber.result() == token_ids
        assert client.result(subscriber.request_id, timeout=DEADLINE).outputs[0].token_ids == token_ids
    assert client.result(waiting, timeout=DEADLINE).error is None
    with connect(new.url) as server:
        for request_id, token_ids in zip(ids, site.undisturbed, strict=True):
            log = StreamLog.read(server, request_id)  # well-formed and without a gap for later readers too
            assert log.content[0].token_ids == token_ids
            assert log.attempts == [1], "another attempt had to resume it"
        assert_settled(server, service)

    # The worker is idle again, and wakes up for messages of every priority on the new master.
    for priority in (0, 3, 6, 9):
        request_id = client.submit("wake", {"max_tokens": 3, "ignore_eos": True}, priority=priority)
        assert client.result(request_id, timeout=DEADLINE).error is None
    with connect(sentinels.url) as reader:
        exporter = Exporter(reader, port=0)
        exporter.poll()
        assert re.search(rb"headrace_exporter_redis_up{server=.*} 1.0", exporter.exposition.exposition())

    old.start()  # it returns as a replica, and no client reconnects to it
    sentinels.wait_watched()
    again = client.submit("again", {"max_tokens": 3})
    assert client.result(again, timeout=DEADLINE).error is None
    site.service.wait_until(lambda: site.worker.health("ready")[0] == 200)  # its last poll may have met the old master
    master = sentinels.master()
    # If the machine stalled for a second, the Sentinels may have elected another master, which is allowed.
    assert master is new or sentinels.elections() > elections
    with connect(master.url) as server:
        assert StreamLog.read(server, again).content, "the request went to the master that the Sentinels name"
    with connect((old if master is new else new).url) as server:
        assert server.info("replication")["role"] == "slave"


def assert_settled(server: "redis.Redis", service: Service) -> None:
    before, service.client = service.client, server
    try:
        service.wait_settled()
        assert service.dead_letters() == []
    finally:
        service.client = before
