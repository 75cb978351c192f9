"""What Redis keeps when it is killed and loads its append-only file, with the shipped users, on each server."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_broker.client.client import Client
from headrace_broker.keys import queue_lists
from headrace_broker.models.registry import register_model
from headrace_broker.queue.leases import Leases
from headrace_broker.server.connections import connect
from headrace_broker.server.restart_safety import restart_safety
from headrace_broker.streams.writer import StreamWrite, StreamWriter
from headrace_cli.exporter import Exporter
from headrace_wire.codes import DeadLetterReason
from service.gateway.in_process import bearer, running_app, write_keys
from service.redis_users import ServerWithUsers, url_of
from service.servers import OLDEST_PROGRAMS, PROGRAM
from service.test_exporter import value
from service.workers.conftest import model_folder
from service.workers.service import Service

__all__ = ["model_folder"]

EVERY_PROGRAM = [pytest.param(PROGRAM, id="embedded"), *OLDEST_PROGRAMS]


@pytest.fixture(params=EVERY_PROGRAM)
def program(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def server(program: str, tmp_path: Path) -> Iterator[ServerWithUsers]:
    with ServerWithUsers(tmp_path, program=program) as running:
        fill(running)
        yield running


@pytest.fixture
def server_without_rights(program: str, tmp_path: Path) -> Iterator[ServerWithUsers]:
    """A server whose default user has no rights, as the shipped files had it."""
    with ServerWithUsers(tmp_path, program=program, default="off") as running:
        fill(running)
        yield running


def fill(server: ServerWithUsers) -> None:
    """Send, lease, answer and dead-letter requests, as each user would: most of it is scripts and transactions."""
    with connect(url_of(server, "worker")) as worker, Client(url_of(server, "client"), model="tiny") as client:
        register_model(worker, "tiny", max_model_len=64, worker="w", seen=1.0)
        sent = [client.submit(f"prompt {number}", tenant="acme", abandon_after=600) for number in range(6)]
        client.submit("once", idempotency_key="k")
        client.cancel(sent[5])
        leases = Leases(worker, lease_seconds=600, delivery_limit=5)
        running, given_up, _ = leases.fetch(queue_lists("headrace.tiny"), 3)
        for lease in (running, given_up):
            leases.hold(lease.lease_id, lease)
        leases.dead_letter(given_up.lease_id, DeadLetterReason.POISON)
        writer = StreamWriter(worker, 600)
        attempt = writer.claim(sent[0], "w").attempt
        writer.publish([StreamWrite.chunk(sent[0], attempt, 2, index=0, token_ids=[1, 2], text="two")])
    with connect(url_of(server, "gateway")) as gateway, gateway.pipeline(transaction=True) as transaction:
        transaction.hset("headrace:gw:response:r", "state", "x").expire("headrace:gw:response:r", 600)
        transaction.execute()


def contents(server: ServerWithUsers) -> dict[bytes, Any]:
    """Read every key of the server."""
    with connect(url_of(server, "admin")) as admin:
        return {key: READERS[admin.type(key)](admin, key) for key in admin.keys("*")}


READERS: dict[bytes, Any] = {
    b"string": lambda admin, key: admin.get(key),
    b"list": lambda admin, key: admin.lrange(key, 0, -1),
    b"hash": lambda admin, key: admin.hgetall(key),
    b"set": lambda admin, key: admin.smembers(key),
    b"zset": lambda admin, key: admin.zrange(key, 0, -1, withscores=True),
    b"stream": lambda admin, key: admin.xrange(key),
}


def restart(server: ServerWithUsers) -> None:
    """kill -9, and start with the same files."""
    server.kill()
    server.start()


def test_a_killed_server_comes_back_with_every_key(server: ServerWithUsers) -> None:
    before = contents(server)
    assert len(before) > 10
    with connect(url_of(server, "worker")) as worker:
        assert restart_safety(worker).warnings == ()
    restart(server)
    assert contents(server) == before
    with connect(url_of(server, "worker")) as worker:
        assert restart_safety(worker).warnings == ()


def test_a_server_that_would_drop_keys_is_recognised_before_and_after(server_without_rights: ServerWithUsers) -> None:
    server = server_without_rights
    before = contents(server)
    found = {}
    for user in ("worker", "exporter", "operator", "admin"):
        with connect(url_of(server, user)) as client:
            found[user] = restart_safety(client)
    assert len(set(found.values())) == 1
    restart(server)
    keeps_all = contents(server) == before
    assert found["worker"].loads_all == keeps_all
    assert bool(found["worker"].warnings) != keeps_all
    with connect(url_of(server, "worker")) as worker:
        assert (restart_safety(worker).load_errors > 0) != keeps_all


@pytest.mark.parametrize("program", OLDEST_PROGRAMS[:1], indirect=True)
async def test_the_worker_and_the_gateway_log_it_when_they_connect(
    server_without_rights: ServerWithUsers, model_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = server_without_rights
    keys = write_keys(tmp_path / "keys", "web")
    async with running_app(url_of(server, "gateway"), keys=tmp_path / "keys") as (_, client):
        assert "Redis would lose transactions" in caplog.text
        body = {"model": "tiny", "input": "a", "background": True}
        created = await client.post("/v1/responses", json=body, headers=bearer(keys["web"]))
        deleted = await client.delete(f"/v1/responses/{created.json()['id']}", headers=bearer(keys["web"]))
        assert deleted.status_code == 200
    service = Service(server, model_folder, tmp_path)
    try:
        worker = service.start_worker(redis_url=url_of(server, "worker")).wait_ready()
        worker.wait_for_log("Redis would lose transactions")
    finally:
        service.close()


@pytest.mark.parametrize("program", OLDEST_PROGRAMS, indirect=True)
def test_the_advice_mends_a_running_server(server_without_rights: ServerWithUsers) -> None:
    server = server_without_rights
    before = contents(server)
    with connect(url_of(server, "admin")) as admin:
        assert "ACL SETUSER default off ~* &* +@all" in restart_safety(admin).warnings[0]
        admin.execute_command("ACL", "SETUSER", "default", "off", "~*", "&*", "+@all")
        assert restart_safety(admin).warnings == ()
        admin.execute_command("ACL", "SAVE")
    restart(server)
    assert contents(server) == before


@pytest.mark.parametrize("program", OLDEST_PROGRAMS, indirect=True)
def test_a_user_that_may_not_ask_is_told_so(server_without_rights: ServerWithUsers) -> None:
    with connect(url_of(server_without_rights, "subscriber")) as client:
        found = restart_safety(client)
    assert found.loads_all is None
    assert "grant this user +acl|dryrun" in found.warnings[0]


def test_the_exporter_shows_what_a_restart_lost(
    server_without_rights: ServerWithUsers, caplog: pytest.LogCaptureFixture
) -> None:
    server = server_without_rights
    with connect(url_of(server, "exporter")) as client:
        exporter = Exporter(client, port=0)
        exporter.poll()
        keeps_all = value(exporter, "headrace_redis_loads_all") == 1
        assert value(exporter, "headrace_redis_load_errors") == 0
        assert value(exporter, "headrace_redis_messages_before_restart") == 0
        waiting = value(exporter, "headrace_queue_messages", state="ready")
        assert waiting > 1
        restart(server)
        exporter.poll()
        exporter.poll()
        assert value(exporter, "headrace_redis_messages_before_restart") == waiting
        if keeps_all:
            assert value(exporter, "headrace_redis_messages_after_restart") >= waiting
        assert (value(exporter, "headrace_redis_load_errors") == 0) == keeps_all
        assert abs(value(exporter, "headrace_redis_start_timestamp_seconds") - time.time()) < 60
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum("would lose transactions" in message for message in told) == (not keeps_all)
    assert sum("refused" in message for message in told) == (not keeps_all)


@pytest.mark.parametrize("program", [PROGRAM], indirect=True)
def test_the_exporter_shows_that_a_server_came_back_empty(server: ServerWithUsers) -> None:
    with connect(url_of(server, "exporter")) as client:
        exporter = Exporter(client, port=0)
        exporter.poll()
        waiting = value(exporter, "headrace_queue_messages", state="ready")
        server.kill()
        for folder in server.folder.glob("appendonlydir"):
            shutil.rmtree(folder)
        server.start()
        exporter.poll()
        assert value(exporter, "headrace_redis_messages_before_restart") == waiting > 1
        assert value(exporter, "headrace_redis_messages_after_restart") == 0
        assert value(exporter, "headrace_redis_load_errors") == 0
