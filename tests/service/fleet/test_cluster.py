"""A Redis Cluster as a stream server: a master dies and a slot moves, and no stream is broken."""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from click.testing import CliRunner

from fleet.workers import SleepingService, sleeping_service
from headrace_broker.client.client import Client
from headrace_broker.client.submission import SubmitRequest, cancel_call, was_cancelled
from headrace_broker.errors import QueueUnavailableError, SettingsError, StreamExpiredError
from headrace_broker.keys import STREAM_SERVER_ID_KEY, STREAM_SERVERS_KEY
from headrace_broker.server.connections import connect_async
from headrace_broker.server.shards import id_in_keys, shard_of
from headrace_broker.server.stream_servers import AsyncStreamServers, StreamServers
from headrace_broker.server.stream_table import StreamServerRow, StreamTable
from headrace_broker.settings import BrokerSettings
from headrace_broker.streams.events import ChunkEvent, EndEvent
from headrace_broker.streams.hub import StreamHub
from headrace_broker.streams.listeners import Listeners
from headrace_broker.streams.writer import END_STREAM, StreamWrite, StreamWriter
from headrace_cli.commands.streams import streams
from headrace_cli.doctor.role_checks import findings
from headrace_cli.exporter import Exporter
from service.gateway.gateway_process import GatewayProcess
from service.redis_cluster import NODE_TIMEOUT, ClusterSite
from service.redis_users import users
from service.workers.service import DEADLINE
from service.workers.worker_process import WorkerProcess

pytestmark = pytest.mark.rotated("broker/headrace_broker/server", "broker/headrace_broker/streams")

PARAMS = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
NUM_STREAMS = 64
TOKENS = 80


def requests(count: int, tokens: int = 8) -> list[SubmitRequest]:
    return [{"prompt": "the wheel", "sampling_params": {**PARAMS, "max_tokens": tokens}} for _ in range(count)]


class Site:
    """A service whose streams are on a Redis Cluster."""

    def __init__(self, service: SleepingService, cluster: ClusterSite) -> None:
        self.service = service
        self.cluster = cluster
        self.urls = f"c1={cluster.url}"
        self.settings = BrokerSettings(service.url, stream_urls=self.urls)

    def command(self, *arguments: str) -> Any:
        """Run `headrace streams` and return what it prints, as JSON."""
        environ = {"HEADRACE_STREAM_URLS": self.urls}
        run = CliRunner().invoke(streams, [*arguments, "--json", "--redis-url", self.service.url], env=environ)
        if run.exception is not None and not isinstance(run.exception, SystemExit):
            raise run.exception
        return json.loads(run.output)

    def start_worker(self, **settings: object) -> WorkerProcess:
        worker = self.service.start_worker(
            command=[sys.executable, "-m", "load.worker"],
            environ=self.service.environ,
            stream_urls=self.urls,
            max_num_seqs=NUM_STREAMS,
            max_num_batched_tokens=2048,
            **settings,
        )
        worker.wait_ready()
        return worker

    def ports(self) -> list[int]:
        """Return the ports of the masters."""
        return self.cluster.master_ports()

    def keys(self, pattern: str) -> set[bytes]:
        """Return the keys of all masters that match."""
        return {key for port in self.ports() for key in self.cluster.client_at(port).keys(pattern)}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterSite]:
    with ClusterSite() as site:
        yield site


@pytest.fixture
def site(cluster: ClusterSite) -> Iterator[Site]:
    with sleeping_service(step_seconds=0.05) as service:
        for port in cluster.master_ports():
            cluster.client_at(port).flushall()
        yield Site(service, cluster)


def test_all_calls_of_a_client_find_streams_on_a_cluster(site: Site) -> None:
    site.command("enable")
    site.start_worker()
    with Client(site.settings, model="tiny") as client:
        ids = client.submit_many(requests(20))
        assert len({shard_of(request_id) for request_id in ids}) > 3
        for request_id in ids:
            assert sum(len(chunk.token_ids) for chunk in client.stream(request_id, timeout=DEADLINE)) == 8
            assert client.result(request_id, timeout=DEADLINE).usage.completion_tokens == 8
            assert client.status(request_id).state == "finished"
            assert client.is_known(request_id)
            assert not client.cancel(request_id)
        names = {id_in_keys("c1" + shard_of(request_id), request_id) for request_id in ids}
        assert site.keys("headrace:stream:*") == {f"headrace:stream:{name}".encode() for name in names}
        assert site.keys("headrace:ended:*") == {f"headrace:ended:{name}".encode() for name in names}
        assert site.service.client.keys("headrace:stream:*") == []
        with pytest.raises(Exception, match="was used for a request"):
            client.submit("the wheel", PARAMS, request_id=ids[0])
        running = client.submit("the wheel", {**PARAMS, "max_tokens": 1500}, abandon_after=60)
        next(iter(client.stream(running, timeout=DEADLINE)))
        assert site.keys("headrace:listener:*")
        assert client.cancel(running)
        assert [event for _, event in client.events_many([running], timeout=DEADLINE)][-1].finish_reason == "cancelled"
        assert client.cancel("unknown")
        assert client.status("unknown").finish_reason == "cancelled"
    site.service.wait_settled()


def test_a_killed_master_and_a_moved_slot_break_no_stream(
    site: Site, record_property: Callable[[str, object], None], cluster: ClusterSite
) -> None:
    site.command("enable")
    site.start_worker()
    with Client(site.settings, model="tiny") as client:
        ids = client.submit_many(requests(NUM_STREAMS, TOKENS))
        offsets, ended, last, silence = dict.fromkeys(ids, 0), set(), {}, 0.0
        has_moved = has_killed = False
        for request_id, event in client.events_many(ids, timeout=DEADLINE):
            now = time.monotonic()
            if isinstance(event, ChunkEvent):
                assert event.offset == offsets[request_id] + len(event.token_ids)
                offsets[request_id] = event.offset
                silence = max(silence, now - last.get(request_id, now))
                last[request_id] = now
            elif isinstance(event, EndEvent):
                assert event.error is None
                ended.add(request_id)
            assert not isinstance(event, StreamExpiredError)
            least = min(offsets.values())
            if least >= 3 and not has_moved:
                has_moved = True
                for request_id in ids[:4]:
                    cluster.move(shard_of(request_id))
            if least >= 12 and not has_killed:
                has_killed = True
                cluster.kill_master_of(STREAM_SERVER_ID_KEY)
        assert has_killed and ended == {*ids}
        assert offsets == dict.fromkeys(ids, TOKENS)
        for request_id in ids:
            assert client.result(request_id, timeout=DEADLINE).usage.completion_tokens == TOKENS
    record_property("longest_silence_seconds", round(silence, 2))
    sys.stderr.write(f"longest silence {silence:.2f} s, node timeout {NODE_TIMEOUT} s\n")
    assert silence < DEADLINE
    site.service.wait_settled()


def test_a_gateway_serves_and_deletes_answers_on_a_cluster(site: Site, tmp_path: Path) -> None:
    site.command("enable")
    site.start_worker()
    gateway = GatewayProcess(
        redis_url=site.service.url, log=tmp_path / "log", stream_urls=site.urls, files=tmp_path / "files"
    )
    try:
        gateway.wait_ready()
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE) as sdk:
            streamed = sdk.completions.create(model="tiny", prompt="the wheel", max_tokens=8, stream=True)
            assert [chunk.choices[0].finish_reason for chunk in streamed][-1] == "length"
            response: Any = sdk.responses.create(model="tiny", input="the wheel", max_output_tokens=8, background=True)
            site.service.wait_until(
                lambda: sdk.responses.retrieve(response.id).status in ("completed", "incomplete"), timeout=DEADLINE
            )
            replayed = list(sdk.responses.retrieve(response.id, stream=True))
            assert replayed[-1].type in ("response.completed", "response.incomplete")
            stream = f"headrace:stream:{shard_of(response.id)}:{response.id}".encode()
            assert site.keys("headrace:stream:*resp*") == {stream}
            sdk.responses.delete(response.id)
            assert site.keys("headrace:stream:*resp*") == set()
    finally:
        gateway.close()


def test_operators_see_a_cluster_as_one_stream_server(site: Site) -> None:
    site.command("enable")
    [listed] = site.command("list")
    assert (listed["name"], listed["state"], listed["problem"]) == ("c1", "open", None)
    site.start_worker()
    with Client(site.settings, model="tiny") as client:
        for request_id in client.submit_many(requests(10)):
            client.result(request_id, timeout=DEADLINE)
    with StreamServers.connected(site.service.client, *site.settings.stream_servers, timeout=5) as servers:
        exporter = Exporter(site.service.client, port=0, streams=servers)
        exporter.poll()
        text = exporter.exposition.exposition().decode()
    assert 'headrace_stream_server_up{stream_server="c1"} 1.0' in text
    assert 'headrace_stream_server_streams{stream_server="c1"} 20.0' in text  # each has a key that says that it ended
    assert all(f'redis_may_evict{{server="127.0.0.1:{port}"}} 0.0' in text for port in site.ports())
    found = findings("client", {"HEADRACE_REDIS_URL": site.service.url, "HEADRACE_STREAM_URLS": site.urls})
    assert any("The Redis Cluster at redis+cluster://" in each.text for each in found)
    site.command("drain", "c1")
    with pytest.raises(SettingsError, match="c1 has 10 streams: wait until they have expired"):
        site.command("forget", "c1")
    for port in site.ports():
        site.cluster.client_at(port).flushall()
    site.cluster.client_of(site.cluster.master_of(STREAM_SERVER_ID_KEY)).set(STREAM_SERVER_ID_KEY, server_id(site))
    site.command("forget", "c1")
    assert [one["state"] for one in site.command("list")] == ["unused"]


def server_id(site: Site) -> str:
    row = StreamServerRow.read(site.service.client.hget(STREAM_SERVERS_KEY, "c1") or b"")
    assert row is not None and row.is_cluster
    return row.server_id


def test_the_url_of_a_single_node_in_place_of_the_cluster_is_refused(site: Site) -> None:
    site.command("enable")
    node = f"c1=redis://127.0.0.1:{site.ports()[0]}"
    with (
        Client(BrokerSettings(site.service.url, stream_urls=node), model="tiny", check_model=False) as client,
        pytest.raises(SettingsError, match=r"c1 is a Redis Cluster, whose URL begins with redis\+cluster://"),
    ):
        client.status("a")
    single = f"c1=redis+cluster://127.0.0.1:{site.service.client.connection_pool.connection_kwargs['port']}"
    with (
        Client(BrokerSettings(site.service.url, stream_urls=single), model="tiny", check_model=False) as client,
        pytest.raises(QueueUnavailableError, match="no node of the Redis Cluster can be reached"),
    ):
        client.status("a")


def test_the_shipped_users_have_the_rights_that_a_cluster_needs(cluster: ClusterSite) -> None:
    for port in cluster.master_ports():
        cluster.client_at(port).flushall()
        for name in ("worker", "client", "subscriber", "exporter"):
            cluster.client_at(port).execute_command("ACL", "SETUSER", name, *users()[name])
    request_ids = [f"r{number}" for number in range(20)]

    def as_user(name: str) -> StreamServers:
        url = cluster.url.replace("://", f"://{name}:secret@")
        return StreamServers.connected(cluster.clients[0], {"c1": url}, 60, timeout=10)

    with as_user("worker") as servers:
        for request_id in request_ids:
            home = servers.home_at("c1", request_id)
            writer = StreamWriter(servers.client(home), 60, home)
            assert writer.takes_writes()
            attempt = writer.claim(request_id, "w").attempt
            chunk = StreamWrite.chunk(request_id, attempt, 1, index=0, token_ids=[1], text="x")
            end = StreamWrite.end(request_id, attempt, 1, finish_reason="stop")
            assert writer.publish([chunk]) == writer.publish([chunk, end]) == {}  # a repeated entry is known as written
            writer.record_engine_losses({request_id: 1})
            assert Listeners(servers.client(home), home).silence({request_id: 60.0}, forget=["r"])
    with as_user("client") as servers:
        for request_id in request_ids:
            home = servers.home_at("c1", request_id)
            end = servers.client(home).register_script(END_STREAM.text)
            assert not was_cancelled(end(**cancel_call(request_id, 60, home)))
    with as_user("exporter") as servers:
        assert sum(client.info("keyspace")["db0"]["keys"] for client in servers.nodes("c1").values()) >= 80
    assert asyncio.run(read_as_subscriber(cluster, request_ids)) == dict.fromkeys(request_ids, 3)


async def read_as_subscriber(cluster: ClusterSite, request_ids: list[str]) -> dict[str, int]:
    """Read streams on a cluster as the user `subscriber`. Returns their numbers of entries."""
    main = connect_async("redis://127.0.0.1:1/0")  # has no table: the homes are given
    servers = AsyncStreamServers.connected(main, {"c1": cluster.url.replace("://", "://subscriber:secret@")}, 60)
    servers.table = StreamTable({"c1": StreamServerRow(0, None, "x", is_cluster=True)})
    cluster.client_of(cluster.master_of(STREAM_SERVER_ID_KEY)).set(STREAM_SERVER_ID_KEY, "x")
    hub = StreamHub(servers)
    counts = dict.fromkeys(request_ids, 0)
    async with hub.subscribe(dict.fromkeys(request_ids)) as subscription:
        while subscription.request_ids:
            for request_id, _ in await subscription.take(None):
                counts[request_id] += 1
    await hub.aclose()
    await servers.aclose()
    await main.aclose()
    return counts
