"""Streams on servers of their own, by HEADRACE_STREAM_URLS and `headrace streams`."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from click.testing import CliRunner

from fleet.workers import SleepingService, sleeping_service
from headrace_broker.client.async_client import AsyncClient
from headrace_broker.client.client import Client
from headrace_broker.errors import SettingsError
from headrace_broker.keys import STREAM_SERVER_ID_KEY, STREAM_SERVERS_KEY
from headrace_broker.results import RequestFailedError
from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.server.stream_table import StreamServerRow, home_of
from headrace_broker.settings import BrokerSettings
from headrace_broker.streams.events import ChunkEvent, EndEvent
from headrace_cli.commands.streams import streams
from service.servers import make_server
from service.workers.service import DEADLINE
from service.workers.worker_process import WorkerProcess

pytestmark = pytest.mark.rotated(
    "broker/headrace_broker/server", "broker/headrace_broker/streams", "workers/headrace_workers/requests"
)

PARAMS = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


class Site:
    """A service whose streams are on two servers of their own."""

    def __init__(self, service: SleepingService, servers: dict[str, EmbeddedServer]) -> None:
        self.service = service
        self.servers = servers
        self.urls = ",".join(f"{name}={server.url}" for name, server in servers.items())
        self.settings = BrokerSettings(service.url, stream_urls=self.urls)
        self.clients = {name: connect(server.url) for name, server in servers.items()}

    def command(self, *arguments: str, urls: str | None = None) -> Any:
        """Run `headrace streams` and return what it prints, as JSON."""
        environ = {"HEADRACE_STREAM_URLS": self.urls if urls is None else urls}
        run = CliRunner().invoke(streams, [*arguments, "--json", "--redis-url", self.service.url], env=environ)
        if run.exception is not None and not isinstance(run.exception, SystemExit):
            raise run.exception
        return json.loads(run.output)

    def start_worker(self, **settings: object) -> WorkerProcess:
        worker = self.begin_worker(self.urls, **settings)
        worker.wait_ready()
        return worker

    def begin_worker(self, urls: str, **settings: object) -> WorkerProcess:
        command = [sys.executable, "-m", "load.worker"]
        environ = self.service.environ
        return self.service.start_worker(command=command, environ=environ, stream_urls=urls, **settings)

    def ids_at(self, home: str, count: int, names: tuple[str, ...] = ("s1", "s2")) -> list[str]:
        """Return new request ids that have this home."""
        return [name for name in (f"r{number}" for number in range(10**4)) if home_of(names, name) == home][:count]

    def streams_on(self, name: str) -> set[str]:
        return {key.decode().rpartition(":")[2] for key in self.clients[name].keys("headrace:stream:*")}


@pytest.fixture
def site() -> Iterator[Site]:
    with sleeping_service(step_seconds=0.01) as service, ExitStack() as stack:
        servers = {name: stack.enter_context(make_server(appendonly=True)) for name in ("s1", "s2")}
        yield Site(service, servers)


def test_streams_are_placed_on_their_servers_only_after_enable(site: Site) -> None:
    site.start_worker()
    with Client(site.settings, model="tiny") as client:
        before = client.submit("the wheel", PARAMS)
        assert client.result(before, timeout=DEADLINE).usage.completion_tokens == 8
        assert site.service.client.exists(f"headrace:stream:{before}")
        assert site.command("enable") == {"enabled": ["s1", "s2"]}
        ids = [client.submit("the wheel", PARAMS, request_id=name) for name in (f"r{number}" for number in range(8))]
        for request_id in ids:
            assert client.result(request_id, timeout=DEADLINE).usage.completion_tokens == 8
            assert sum(len(chunk.token_ids) for chunk in client.stream(request_id, timeout=DEADLINE)) == 8
            assert client.status(request_id).state == "finished"
            assert client.is_known(request_id)
        for name in ("s1", "s2"):
            assert site.streams_on(name) == {
                request_id for request_id in ids if home_of(("s1", "s2"), request_id) == name
            }
            assert {b"headrace:ended:" + each.encode() for each in site.streams_on(name)} == {
                *site.clients[name].keys("headrace:ended:*")
            }
            assert site.clients[name].keys("headrace:queue:*") == site.clients[name].keys("celery*") == []
        assert site.service.client.keys("headrace:stream:*") == [f"headrace:stream:{before}".encode()]
        assert [chunk.token_ids for chunk in client.stream(before, timeout=DEADLINE)] != []
        with pytest.raises(Exception, match="was used for a request"):
            client.submit("the wheel", PARAMS, request_id=ids[0])
        waiting = client.submit("the wheel", {**PARAMS, "max_tokens": 1500})
        assert client.cancel(waiting)
        assert [event for _, event in client.events_many([waiting], timeout=DEADLINE)][-1].finish_reason == "cancelled"
    site.service.wait_settled()


def read_all(client: Client, ids: list[str]) -> dict[str, list[ChunkEvent]]:
    """Read the streams to their ends, and check that no chunk is missing or doubled."""
    chunks: dict[str, list[ChunkEvent]] = {request_id: [] for request_id in ids}
    for request_id, event in client.events_many(ids, timeout=DEADLINE):
        if isinstance(event, ChunkEvent):
            offset = chunks[request_id][-1].offset if chunks[request_id] else 0
            assert event.offset == offset + len(event.token_ids)
            chunks[request_id].append(event)
        elif isinstance(event, EndEvent):
            assert event.error is None
    return chunks


def test_a_killed_stream_server_delays_only_its_own_streams(site: Site) -> None:
    site.start_worker(lease_seconds=5)
    site.command("enable")
    dead, living = site.ids_at("s1", 3), site.ids_at("s2", 3)
    with Client(site.settings, model="tiny") as client:
        for request_id in [*dead[:2], *living[:2]]:
            client.submit("the wheel", {**PARAMS, "max_tokens": 1200}, request_id=request_id)
        for request_id in [*dead[:2], *living[:2]]:
            next(iter(client.stream(request_id, timeout=DEADLINE)))
        site.servers["s1"].kill()
        client.submit("the wheel", PARAMS, request_id=living[2])
        client.submit("the wheel", PARAMS, request_id=dead[2])
        for request_id in living:
            assert client.result(request_id, timeout=DEADLINE).usage.completion_tokens in (8, 1200)
        site.servers["s1"].start()
        assert {
            name: sum(len(chunk.token_ids) for chunk in chunks)
            for name, chunks in read_all(client, dead + living).items()
        } == {
            **dict.fromkeys(dead[:2] + living[:2], 1200),
            dead[2]: 8,
            living[2]: 8,
        }
        for request_id in dead:
            assert client.result(request_id, timeout=DEADLINE).usage.completion_tokens in (8, 1200)
    site.service.wait_settled()


def test_a_hanging_stream_server_delays_only_its_own_streams(site: Site) -> None:
    worker = site.start_worker(lease_seconds=5)
    site.command("enable")
    dead, living = site.ids_at("s1", 3), site.ids_at("s2", 2)
    with Client(site.settings, model="tiny") as client:
        for request_id in [*dead[:2], living[0]]:
            client.submit("the wheel", {**PARAMS, "max_tokens": 1000}, request_id=request_id)
        for request_id in [*dead[:2], living[0]]:
            next(iter(client.stream(request_id, timeout=DEADLINE)))
        os.kill(site.servers["s1"].pid or 0, signal.SIGSTOP)
        try:
            worker.wait_for_log("stream server away")
            client.submit("the wheel", PARAMS, request_id=dead[2])
            client.submit("the wheel", PARAMS, request_id=living[1])
            for request_id in living:
                assert client.result(request_id, timeout=DEADLINE).usage.completion_tokens in (8, 1000)
        finally:
            os.kill(site.servers["s1"].pid or 0, signal.SIGCONT)
        found = read_all(client, dead)
        assert [sum(len(chunk.token_ids) for chunk in found[name]) for name in dead] == [1000, 1000, 8]
        assert client.result(dead[2], timeout=DEADLINE).usage.completion_tokens == 8
        assert "stream server back" in worker.log_text()
    site.service.wait_settled()


def test_requests_of_a_lost_server_end_if_they_had_begun_and_move_if_not(site: Site) -> None:
    site.start_worker(lease_seconds=5)
    site.command("enable")
    begun, waiting = site.ids_at("s1", 2)
    with Client(site.settings, model="tiny") as client:
        client.submit("the wheel", {**PARAMS, "max_tokens": 1900}, request_id=begun)
        events = client.events_many([begun], timeout=DEADLINE)
        next(event for _, event in events if isinstance(event, ChunkEvent))  # without one, the request may move
        site.servers["s1"].kill()
        client.submit("the wheel", PARAMS, request_id=waiting)
        site.service.wait_until(lambda: site.service.client.hlen("headrace:lease:record:headrace.tiny") == 2, DEADLINE)
        assert site.command("forget", "s1", "--lost") == {"lost": ["s1"]}
        assert read_all(client, [waiting])[waiting][-1].offset == 8
        assert site.clients["s2"].exists(f"headrace:stream:{waiting}")
        *_, (_, end) = events
        assert isinstance(end, EndEvent) and end.error is not None
        assert end.error.code == "stream_lost"
        assert "the stream server s1 lost the request's stream" in end.error.message
        with pytest.raises(RequestFailedError) as failed:
            client.result(begun, timeout=DEADLINE)
        assert failed.value.code == "stream_lost"
        assert client.status(begun).finish_reason == "error"
        assert [(one["name"], one["state"]) for one in site.command("list")] == [("s1", "lost"), ("s2", "open")]
        site.service.wait_settled()
        assert site.command("forget", "s1") == {"forgotten": ["s1"]}
        again = client.submit("the wheel", PARAMS)
        assert client.result(again, timeout=DEADLINE).usage.completion_tokens == 8


def test_a_server_that_comes_back_without_its_data_is_used_again_after_add(site: Site) -> None:
    site.start_worker(lease_seconds=5)
    site.command("enable")
    begun, later = site.ids_at("s1", 2)
    with Client(site.settings, model="tiny") as client:
        client.submit("the wheel", {**PARAMS, "max_tokens": 1900}, request_id=begun)
        events = client.events_many([begun], timeout=DEADLINE)
        chunk = next(event for _, event in events if isinstance(event, ChunkEvent))
        site.servers["s1"].kill()
        for file in site.servers["s1"].folder.glob("appendonlydir/*"):
            file.unlink()
        site.servers["s1"].start()
        site.service.wait_until(lambda: "has no id" in str(site.command("list")), DEADLINE)
        site.command("add", "s1")
        with pytest.raises(RequestFailedError) as failed:
            client.result(begun, timeout=DEADLINE)
        assert failed.value.code == "stream_lost"
        *_, (_, end) = client.events_many({begun: chunk.entry_id}, timeout=DEADLINE)
        assert isinstance(end, EndEvent) and end.error is not None
        assert end.error.code == "stream_lost"
        client.submit("the wheel", PARAMS, request_id=later)
        assert read_all(client, [later])[later][-1].offset == 8
        assert site.clients["s1"].exists(f"headrace:stream:{later}")
    site.service.wait_settled()


def test_a_worker_without_the_url_of_a_server_is_not_ready_and_a_client_refuses_it(site: Site) -> None:
    site.command("enable")
    worker = site.begin_worker(f"s1={site.servers['s1'].url}")
    expected = "s2 has none; given are s1"
    site.service.wait_until(lambda: expected in str(worker.health("ready")), timeout=DEADLINE)
    with Client(BrokerSettings(site.service.url), model="tiny", check_model=False) as client:
        request_id = client.submit("the wheel", PARAMS)
        for call in (client.status, client.cancel, lambda name: next(client.stream(name))):
            with pytest.raises(
                SettingsError, match=r"HEADRACE_STREAM_URLS must have the URL .*: s1 has none; given are none"
            ):
                call(request_id)
    [listed] = [one for one in site.command("list", urls=f"s9={site.servers['s2'].url}") if one["state"] == "unused"]
    assert listed["name"] == "s9"
    site.start_worker()
    with Client(site.settings) as client:
        assert client.result(request_id, timeout=DEADLINE).usage.completion_tokens == 8


def test_a_server_behind_the_wrong_url_is_refused_by_name(site: Site) -> None:
    site.command("enable")
    swapped = f"s1={site.servers['s2'].url},s2={site.servers['s1'].url}"
    worker = site.begin_worker(swapped)
    worker.wait_for_log("the URL of s1 in HEADRACE_STREAM_URLS leads to another server")
    with Client(BrokerSettings(site.service.url, stream_urls=swapped), model="tiny", check_model=False) as client:
        request_id = client.submit("the wheel", PARAMS)
        with pytest.raises(SettingsError, match="leads to another server"):
            client.status(request_id)
        with pytest.raises(SettingsError, match="leads to another server"):
            next(client.stream(request_id))
    site.start_worker()
    with Client(site.settings) as client:
        assert client.result(request_id, timeout=DEADLINE).usage.completion_tokens == 8


def test_readers_find_streams_on_a_server_that_is_added_or_drained_meanwhile(site: Site) -> None:
    third = site.servers.pop("s2")
    site.urls = f"s1={site.servers['s1'].url},s2={third.url}"
    site.command("enable", urls=f"s1={site.servers['s1'].url}")
    moved = site.ids_at("s2", 2)
    site.start_worker()

    async def read() -> list[int]:
        async with AsyncClient(site.settings, model="tiny", check_model=False) as client:
            events = client.events(moved[0], timeout=DEADLINE)
            first = asyncio.ensure_future(anext(events))  # begins to read before the server is added
            await asyncio.sleep(0)
            await asyncio.to_thread(site.command, "add", "s2")
            await client.submit("the wheel", PARAMS, request_id=moved[0])
            tokens = [len(event.token_ids) for event in [await first] if isinstance(event, ChunkEvent)]
            return tokens + [len(event.token_ids) async for event in events if isinstance(event, ChunkEvent)]

    assert sum(asyncio.run(read())) == 8
    assert site.clients["s2"].exists(f"headrace:stream:{moved[0]}")
    site.command("drain", "s2")
    with Client(site.settings, model="tiny") as client:
        client.submit("the wheel", PARAMS, request_id=moved[1])
        assert sum(len(chunk.token_ids) for chunk in client.stream(moved[1], timeout=DEADLINE)) == 8
        assert site.clients["s1"].exists(f"headrace:stream:{moved[1]}")
        assert sum(len(chunk.token_ids) for chunk in client.stream(moved[0], timeout=DEADLINE)) == 8
    site.service.wait_settled()


def test_a_request_that_is_cancelled_before_the_table_changes_does_not_run(site: Site) -> None:
    site.command("enable", urls=f"s1={site.servers['s1'].url}")
    [request_id] = site.ids_at("s2", 1)
    with Client(site.settings, model="tiny", check_model=False) as client:
        assert client.cancel(request_id)
        site.command("add", "s2")
        client.submit("the wheel", PARAMS)
        site.service.client.rpush("headrace.tiny", *raw_message(site, request_id))
        site.start_worker()
        with pytest.raises(Exception, match="cancelled"):
            client.result(request_id, timeout=DEADLINE)
    assert not site.clients["s2"].exists(f"headrace:stream:{request_id}")


def raw_message(site: Site, request_id: str) -> list[bytes]:
    """Return a message with a request id that a client would refuse."""
    site.service.app.send_task(
        "headrace.generate",
        kwargs={"prompt": "the wheel", "sampling_params": PARAMS},
        queue="headrace.tiny",
        task_id=request_id,
    )
    found: Any = site.service.client.lpop("headrace.tiny", 1)
    return list(found)


def test_the_table_is_checked_by_the_command(site: Site) -> None:
    def refused(*arguments: str, urls: str | None = None) -> str:
        with pytest.raises(SettingsError) as caught:
            site.command(*arguments, urls=urls)
        return str(caught.value)

    assert "run `headrace streams enable` first" in refused("add", "s1")
    assert "HEADRACE_STREAM_URLS must name" in refused("enable", urls="")
    site.command("enable", urls=f"s1={site.servers['s1'].url}")
    assert "placed on stream servers already" in refused("enable")
    assert "s3 has none; given are s1, s2" in refused("add", "s3")
    assert "lead to one server" in refused("add", "s3", urls=f"{site.urls},s3={site.servers['s1'].url}")
    site.command("add", "s2")
    row = StreamServerRow.read(site.service.client.hget(STREAM_SERVERS_KEY, "s2") or b"")
    assert row is not None
    assert site.clients["s2"].get(STREAM_SERVER_ID_KEY) == row.server_id.encode()
    site.clients["s2"].delete(STREAM_SERVER_ID_KEY)
    site.command("add", "s2")  # restores the id
    assert site.clients["s2"].get(STREAM_SERVER_ID_KEY) == row.server_id.encode()
    assert "run `headrace streams drain s2` first" in refused("forget", "s2")
    site.command("drain", "s2")
    assert "s2 is draining" in refused("add", "s2")
    site.clients["s2"].xadd("headrace:stream:r", {"a": "b"})
    assert "s2 has 1 streams" in refused("forget", "s2")
    site.clients["s2"].delete("headrace:stream:r")
    site.clients["s1"].config_set("maxmemory-policy", "allkeys-lru")
    states = {one["name"]: one for one in site.command("list")}
    assert (states["s1"]["state"], states["s2"]["state"]) == ("open", "draining")
    assert "allkeys-lru" in states["s1"]["problem"]
    assert states["s2"]["problem"] is None
    site.command("forget", "s2")
    assert [one["state"] for one in site.command("list")] == ["open", "unused"]
    site.service.client.hset(STREAM_SERVERS_KEY, "s2", b"\xc1")
    assert [one["name"] for one in site.command("list")] == ["s1", "s2"]
