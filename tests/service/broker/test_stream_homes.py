"""Readers and writers of streams that are on two servers of their own."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from headrace_broker.client.async_client import AsyncClient
from headrace_broker.client.client import Client
from headrace_broker.errors import ResultTimeoutError, SettingsError, StreamExpiredError, StreamServerUnavailableError
from headrace_broker.keys import STREAM_SERVER_ID_KEY, STREAM_SERVERS_KEY, ended_key, stream_key
from headrace_broker.queue.leases import Leases
from headrace_broker.server.asking_homes import server_having
from headrace_broker.server.connections import connect, connect_async
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.server.stream_servers import TABLE_SECONDS, AsyncStreamServers, StreamServers
from headrace_broker.server.stream_table import StreamServerRow, home_of
from headrace_broker.server.stream_table_editor import StreamTableEditor
from headrace_broker.settings import BrokerSettings
from headrace_broker.streams.events import ChunkEvent, EndEvent
from headrace_broker.streams.hub import StreamHub
from headrace_broker.streams.writer import StreamWrite, StreamWriter, WriteOutcome
from headrace_cli.doctor.role_checks import findings
from headrace_cli.exporter import Exporter
from headrace_monitoring.metrics import Metrics
from headrace_workers.requests.publisher import MOST_PENDING_BYTES, Publishers
from headrace_workers.requests.stream_homes import StreamHomes
from service.broker.tenant_messages import LISTS, envelope
from service.redis_users import ServerWithUsers, url_at
from service.servers import make_server

NAMES = ("s1", "s2")


class Two:
    """Two stream servers in the table of a main server. All homes of the last day count: the main server does, too."""

    def __init__(self, main: EmbeddedServer, servers: dict[str, EmbeddedServer]) -> None:
        self.servers = servers
        self.settings = BrokerSettings(main.url, stream_urls=",".join(f"{k}={v.url}" for k, v in servers.items()))
        self.main = connect(main.url)
        self.clients = {name: connect(server.url) for name, server in servers.items()}
        since = int(time.time() * 1000) - 1000
        for name, client in self.clients.items():
            client.set(STREAM_SERVER_ID_KEY, name)
            self.main.hset(STREAM_SERVERS_KEY, name, StreamServerRow(since, None, name).pack())

    def write(self, home: str, request_id: str, tokens: int = 3, *, ends: bool = True) -> None:
        """Write a whole stream to a server; '' is the main one."""
        writer = StreamWriter(self.clients.get(home, self.main), 60)
        claim = writer.claim(request_id, "w")
        writer.publish([chunk(request_id, number + 1, claim.attempt) for number in range(tokens)])
        if ends:
            writer.publish([StreamWrite.end(request_id, claim.attempt, tokens, finish_reason="stop")])

    def id_at(self, home: str) -> str:
        return next(name for name in (f"r{number}" for number in range(99)) if home_of(NAMES, name) == home)


def chunk(request_id: str, offset: int, attempt: int = 1) -> StreamWrite:
    return StreamWrite.chunk(request_id, attempt, offset, index=0, token_ids=[offset], text="x")


@pytest.fixture
def two(redis_server: EmbeddedServer) -> Iterator[Two]:
    with ExitStack() as stack:
        yield Two(redis_server, {name: stack.enter_context(make_server()) for name in NAMES})


def tokens_of(client: Client, request_id: str, last_id: str | None = None) -> list[int]:
    return [chunk.offset for chunk in client.stream(request_id, last_id=last_id, timeout=20)]


@pytest.mark.parametrize("home", ["s1", "s2", ""])
def test_a_stream_is_read_at_every_home_since_yesterday(two: Two, home: str) -> None:
    request_id = two.id_at(home or "s1")
    two.write(home, request_id)
    with Client(two.settings) as client:
        assert tokens_of(client, request_id) == [1, 2, 3]
        assert tokens_of(client, request_id, "1-2") == [3]
        assert tokens_of(client, request_id, "1-3") == []
        assert client.status(request_id).tokens == 3


@pytest.mark.parametrize("user", ["client", "subscriber", "gateway", "worker"])
def test_the_redis_users_that_we_ship_may_read_streams_at_every_home(user: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        main, *others = (stack.enter_context(ServerWithUsers(tmp_path)) for _ in range(3))
        two = Two(main, dict(zip(NAMES, others, strict=True)))
        urls = ",".join(f"{name}={url_at(server.port, user)}" for name, server in two.servers.items())
        with Client(BrokerSettings(url_at(main.port, user), stream_urls=urls)) as client:
            for home in NAMES:
                two.write(home, two.id_at(home))
                assert tokens_of(client, two.id_at(home)) == [1, 2, 3]


def test_a_server_is_forgotten_only_when_no_message_has_its_stream_there(two: Two) -> None:
    request_id = two.id_at("s1")
    leases = Leases(two.main, lease_seconds=30, delivery_limit=5)
    two.main.lpush(LISTS[0], envelope(request_id, "t", id=request_id))
    leases.sort(LISTS)
    with StreamServers.connected(two.main, *two.settings.stream_servers) as servers:
        editor = StreamTableEditor(servers)
        editor.drain("s1")
        with pytest.raises(SettingsError, match="1 queued messages have their streams on s1"):
            editor.forget("s1")
        (message,) = leases.fetch(LISTS, 1)
        assert message.home == "s1"
        leases.hold(message.lease_id, message)
        leases.ack(message.lease_id)
        editor.forget("s1")
        assert list(servers.refresh().rows) == ["s2"]


def test_a_stream_that_has_expired_at_one_home_has_expired(two: Two) -> None:
    request_id = two.id_at("s1")
    two.clients["s1"].set(ended_key(request_id), "1")
    with Client(two.settings) as client:
        for last_id in (None, "1-2"):
            with pytest.raises(StreamExpiredError):
                tokens_of(client, request_id, last_id)
        with pytest.raises(StreamExpiredError):  # no home knows it, and it was read before
            tokens_of(client, two.id_at("s2"), "1-2")


def test_a_stream_without_an_entry_is_awaited_until_the_timeout(two: Two) -> None:
    with Client(two.settings) as client, pytest.raises(ResultTimeoutError):
        list(client.stream(two.id_at("s1"), timeout=0.3))


def test_a_cancellation_ends_the_stream_where_it_is_and_else_at_every_home(two: Two) -> None:
    request_id = two.id_at("s1")
    two.write("", request_id, ends=False)
    with Client(two.settings) as client:
        assert client.cancel(request_id)
        assert not two.clients["s1"].exists(f"headrace:stream:{request_id}")
        other = two.id_at("s2")
        assert client.cancel(other)
        assert two.clients["s2"].exists(f"headrace:stream:{other}")
        assert two.main.exists(f"headrace:stream:{other}")


CALLS = {
    "status": lambda client, request_id: client.status(request_id),
    "cancel": lambda client, request_id: client.cancel(request_id),
    "is_known": lambda client, request_id: client.is_known(request_id),
}


@pytest.fixture(params=["killed", "hanging"])
def s1_away(two: Two, request: pytest.FixtureRequest) -> Iterator[None]:
    """The server s1 does not answer."""
    server = two.servers["s1"]
    if request.param == "killed":
        server.kill()
        yield
    else:
        os.kill(server.pid or 0, signal.SIGSTOP)
        yield
        os.kill(server.pid or 0, signal.SIGCONT)


@pytest.mark.usefixtures("s1_away")
async def test_a_request_that_lives_elsewhere_needs_no_server_that_is_away(two: Two) -> None:
    request_id = two.id_at("s1")  # by the table of today; it was placed on the main server before
    two.write("", request_id, ends=False)
    with Client(two.settings) as client:
        assert client.is_known(request_id)
        assert client.status(request_id).tokens == 3
        assert client.cancel(request_id)
    async with AsyncClient(two.settings) as asynchronous:
        assert (await asynchronous.status(request_id)).finish_reason == "cancelled"
        assert await asynchronous.cancel(request_id)
        assert await asynchronous.is_known(request_id)
    async with connect_async(two.settings.redis_url) as main:
        servers = AsyncStreamServers.connected(main, *two.settings.stream_servers)
        assert await server_having(servers, request_id) == (main, request_id)
        await servers.aclose()


@pytest.mark.usefixtures("s1_away")
async def test_the_server_that_is_away_is_named_if_no_other_has_the_request(two: Two) -> None:
    request_id, elsewhere = two.id_at("s1"), two.id_at("s2")
    address = f"the stream server s1 at 127.0.0.1:{two.servers['s1'].port} is away"
    with Client(two.settings) as client:
        for call in CALLS.values():
            with pytest.raises(StreamServerUnavailableError, match=address):
                call(client, request_id)
        assert client.status(elsewhere).state == "pending"
        assert client.is_known(elsewhere) is False
    async with AsyncClient(two.settings) as asynchronous:
        for call in CALLS.values():
            with pytest.raises(StreamServerUnavailableError, match=address):
                await call(asynchronous, request_id)
    assert not two.main.exists(f"headrace:stream:{request_id}")  # nothing was cancelled in advance


async def test_a_cancellation_that_one_home_refuses_names_it_however_often_it_is_repeated(two: Two) -> None:
    two.clients["s1"].config_set("maxmemory", "1")
    with (
        Client(two.settings) as client,
        pytest.raises(StreamServerUnavailableError, match=r"server s1 at .* refused"),
    ):
        client.cancel(two.id_at("s1"))
    with (  # the end that the main server has now is no answer
        Client(two.settings) as client,
        pytest.raises(StreamServerUnavailableError, match=r"server s1 at .* refused"),
    ):
        client.cancel(two.id_at("s1"))
    async with AsyncClient(two.settings) as asynchronous:
        with pytest.raises(StreamServerUnavailableError, match=r"server s1 at .* refused"):
            await asynchronous.cancel(two.id_at("s1"))
        two.clients["s1"].config_set("maxmemory", "0")
        assert await asynchronous.cancel(two.id_at("s1"))
    assert two.clients["s1"].exists(stream_key(two.id_at("s1")))


def test_a_request_elsewhere_needs_no_server_that_has_lost_its_id(two: Two) -> None:
    request_id = two.id_at("s1")
    two.write("", request_id)
    two.clients["s1"].flushall()
    with Client(two.settings) as client:
        assert client.status(request_id).tokens == 3
        two.main.delete(stream_key(request_id))
        with pytest.raises(SettingsError, match="s1 in HEADRACE_STREAM_URLS leads to another server"):
            client.status(request_id)


async def test_a_hub_reads_one_server_while_another_hangs(two: Two) -> None:
    there, here = two.id_at("s1"), two.id_at("s2")
    two.write("s2", here)
    async with connect_async(two.settings.redis_url) as main:
        servers = AsyncStreamServers.connected(main, *two.settings.stream_servers)
        hub = StreamHub(servers)
        os.kill(two.servers["s1"].pid or 0, signal.SIGSTOP)
        try:
            waiting = asyncio.create_task(read(hub, there))
            assert await asyncio.wait_for(read(hub, here), 20) == [1, 2, 3]
        finally:
            os.kill(two.servers["s1"].pid or 0, signal.SIGCONT)
        two.write("s1", there)
        assert await asyncio.wait_for(waiting, 60) == [1, 2, 3]
        await hub.aclose()
        await servers.aclose()


async def read(hub: StreamHub, request_id: str) -> list[int]:
    async with hub.subscribe({request_id: None}) as subscription:
        found: list[int] = []
        while subscription.request_ids:
            for _, event in await subscription.take(None):
                assert not isinstance(event, StreamExpiredError)
                found += [event.offset] if isinstance(event, ChunkEvent) else []
                assert not isinstance(event, EndEvent) or event.error is None
        return found


def test_a_worker_seldom_reads_a_table_that_nobody_uses(two: Two) -> None:
    now = 0.0

    def reads(homes: StreamHomes, seconds: float, **options: bool) -> bool:
        nonlocal now
        now += seconds
        two.main.config_resetstat()
        homes.refresh(**options)
        return "cmdstat_hgetall" in two.main.info("commandstats")

    two.main.delete(STREAM_SERVERS_KEY)
    with StreamServers.connected(two.main, {}, 60, timeout=0.5) as none:
        homes = StreamHomes(none, 60, lambda: now)
        assert reads(homes, 0.0)
        assert not reads(homes, TABLE_SECONDS)
        assert reads(homes, TABLE_SECONDS, is_reconnected=True)
        assert reads(homes, 5 * TABLE_SECONDS)
        assert not reads(homes, TABLE_SECONDS)
        assert homes.is_away("s1")
        assert reads(homes, 0.0), "a message has its stream on a server that the table has now"
    with StreamServers.connected(two.main, *two.settings.stream_servers, timeout=0.5) as named:
        homes = StreamHomes(named, 60, lambda: now)
        assert reads(homes, 0.0)
        assert not reads(homes, TABLE_SECONDS / 2)
        assert reads(homes, TABLE_SECONDS / 2)


@pytest.fixture
def homes(two: Two) -> Iterator[StreamHomes]:
    with StreamServers.connected(two.main, *two.settings.stream_servers, timeout=0.5) as servers:
        homes = StreamHomes(servers, 60)
        homes.refresh()
        for name in NAMES:
            homes.writer(name).claim(name, "w")
        yield homes


def test_a_late_server_is_away_and_its_entries_wait_in_order(two: Two, homes: StreamHomes) -> None:
    publishers = Publishers(homes, Metrics(model="tiny", queue="headrace.tiny"))
    os.kill(two.servers["s1"].pid or 0, signal.SIGSTOP)
    try:
        for offset in (1, 2, 3):
            for name in NAMES:
                publishers.of(name).add(chunk(name, offset))
            started = time.monotonic()
            flushed = publishers.flush()
            assert time.monotonic() - started < 5
            assert flushed.behind == {"s1"}
        assert homes.away() == {"s1"}
        assert two.clients["s2"].xlen("headrace:stream:s2") == 4
    finally:
        os.kill(two.servers["s1"].pid or 0, signal.SIGCONT)
    deadline = time.monotonic() + 60
    while publishers.flush(retry=True).behind:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert homes.away() == set()
    assert [entry_id for entry_id, _ in two.clients["s1"].xrange("headrace:stream:s1")] == [
        b"1-0",
        b"1-1",
        b"1-2",
        b"1-3",
    ]


def test_outcomes_of_all_servers_are_returned(two: Two, homes: StreamHomes) -> None:
    publishers = Publishers(homes, Metrics(model="tiny", queue="headrace.tiny"))
    two.clients["s1"].delete("headrace:stream:s1")
    for name in NAMES:
        publishers.of(name).add(chunk(name, 1))
    flushed = publishers.flush()
    assert (flushed.refused, flushed.behind) == ({("s1", 1): WriteOutcome.GONE}, set())


def test_too_many_entries_for_one_server_are_noticed_and_dropped_with_their_attempts(homes: StreamHomes) -> None:
    publishers = Publishers(homes, Metrics(model="tiny", queue="headrace.tiny"))
    large = StreamWrite("s1", 1, "1-1", "1-0", "chunk", b"x" * (1 << 20))
    publishers.of("s1").add(*[large] * (MOST_PENDING_BYTES >> 20))
    assert publishers.overfull() == ["s1"]
    publishers.of("s1").drop(("s1", 1))
    assert (publishers.overfull(), len(publishers)) == ([], 0)


def test_all_entries_of_a_server_are_dropped_in_one_pass(two: Two, homes: StreamHomes) -> None:
    publisher = Publishers(homes, Metrics(model="tiny", queue="headrace.tiny")).of("s1")
    many = [StreamWrite(f"r{number}", 1, "1-1", "1-0", "chunk", b"x") for number in range(10_000)]
    publisher.add(*many, chunk("s1", 1))
    publisher.drop_all()
    assert (len(publisher), publisher.num_bytes()) == (0, 0)
    assert publisher.flush() == {}
    assert [entry_id for entry_id, _ in two.clients["s1"].xrange("headrace:stream:s1")] == [b"1-0"]


def test_a_server_that_refuses_writes_is_away_until_it_accepts_them(two: Two, homes: StreamHomes) -> None:
    publishers = Publishers(homes, Metrics(model="tiny", queue="headrace.tiny"))
    two.clients["s1"].config_set("maxmemory", "1")
    publishers.of("s1").add(chunk("s1", 1))
    assert publishers.flush().behind == {"s1"}
    assert homes.away() == {"s1"}
    with pytest.raises(redis.ConnectionError, match="the stream server s1 is away"), homes.writing("s1"):
        pass
    two.clients["s1"].config_set("maxmemory", "0")
    deadline = time.monotonic() + 60
    while publishers.flush(retry=True).behind:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert homes.away() == set()


def test_the_exporter_reports_each_stream_server(two: Two) -> None:
    two.write("s2", two.id_at("s2"))
    two.main.hset(STREAM_SERVERS_KEY, "s2", StreamServerRow(1, 2, "s2").pack())
    with StreamServers.connected(two.main, *two.settings.stream_servers, timeout=1) as servers:
        exporter = Exporter(two.main, port=0, streams=servers)
        exporter.poll()
        text = exporter.exposition.exposition().decode()
        for line in (
            'stream_server_up{stream_server="s1"} 1.0',
            'stream_server_streams{stream_server="s2"} 2.0',
            'stream_server_draining{stream_server="s1"} 0.0',
            'stream_server_draining{stream_server="s2"} 1.0',
            f'redis_may_evict{{server="127.0.0.1:{two.servers["s1"].port}"}} 0.0',
        ):
            assert f"headrace_{line}" in text
        two.servers["s1"].kill()
        exporter.poll()
        text = exporter.exposition.exposition().decode()
        assert 'headrace_stream_server_up{stream_server="s1"} 0.0' in text
        assert 'headrace_stream_server_up{stream_server="s2"} 1.0' in text


def test_the_doctor_checks_the_stream_servers(two: Two) -> None:
    environ = {"HEADRACE_REDIS_URL": two.settings.redis_url}

    def found(urls: str) -> list[str]:
        checked = findings("client", {**environ, "HEADRACE_STREAM_URLS": urls})
        return [each.text for each in checked if each.check == "stream-servers"]

    s1, s2 = (two.servers[name].url for name in NAMES)
    assert found(f"s1={s1},s2={s2}") == []
    assert any("s2 has none; given are s1" in text for text in found(f"s1={s1}"))
    assert any("leads to another server" in text for text in found(f"s1={s1},s2={s1}"))
    assert any("No streams are placed on s3" in text for text in found(f"s1={s1},s2={s2},s3={s1}"))


async def test_many_subscribers_read_the_table_of_stream_servers_once(two: Two) -> None:
    async with connect_async(two.settings.redis_url) as main:
        servers = AsyncStreamServers.connected(main, *two.settings.stream_servers)
        two.main.config_resetstat()
        homes = await asyncio.gather(*(servers.homes(two.id_at("s1")) for _ in range(200)))
        assert {*map(tuple, homes)} == {("s1", "")}
        assert two.main.info("commandstats")["cmdstat_hgetall"]["calls"] == 1
        await servers.aclose()
