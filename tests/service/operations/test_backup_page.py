"""The commands of docs/backup.md, on a real server with the shipped users."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from headrace_broker.client.client import Client
from headrace_broker.keys import queue_lists
from headrace_broker.models.registry import register_model
from headrace_broker.queue.leases import Leases
from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import EmbeddedServer, free_port
from headrace_broker.settings import BrokerSettings
from headrace_broker.streams.writer import StreamWriter
from service.redis_users import ServerWithUsers, url_at, url_of

PAGE = Path(__file__).parents[3] / "docs" / "backup.md"
PROGRAM = "redis-server"

pytestmark = pytest.mark.skipif(
    any(shutil.which(name) is None for name in (PROGRAM, "redis-cli", "redis-check-rdb")), reason="needs redis-server"
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with ServerWithUsers(tmp_path, program=PROGRAM) as running:
        yield running


def blocks(heading: str) -> list[str]:
    """Get the commands under a heading; those before the first one are under ''."""
    sections = re.split(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = dict(zip(["", *sections[1::2]], sections[::2], strict=True))
    return re.findall(r"^```sh\n(.*?)^```$", found[heading], re.MULTILINE | re.DOTALL)


def run(folder: Path, port: int, commands: str, **variables: str) -> str:
    (setup,) = blocks("")
    environ = {**os.environ, "REDIS_PORT": str(port), "REDIS_ADMIN_PASSWORD": "secret", **variables}
    script = f"set -e -o pipefail\n{setup}{commands}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


READ = {
    b"string": lambda client, key: client.get(key),
    b"hash": lambda client, key: client.hgetall(key),
    b"set": lambda client, key: client.smembers(key),
    b"list": lambda client, key: client.lrange(key, 0, -1),
    b"zset": lambda client, key: client.zrange(key, 0, -1, withscores=True),
    b"stream": lambda client, key: client.xrange(key),
}
"""How the content of each type is read. Not by DUMP: the order of a large hash is another one in each process."""


def contents(client: "redis.Redis") -> dict[bytes, tuple[Any, int]]:
    """Read every key with its content and expiry."""
    return {key: (READ[client.type(key)](client, key), client.pexpiretime(key)) for key in client.scan_iter()}


def test_a_restored_server_has_every_key_and_serves_its_queue(server: EmbeddedServer, tmp_path: Path) -> None:
    with connect(url_of(server, "worker")) as worker:
        register_model(worker, "tiny", max_model_len=99, worker="w", seen=5.0)
        with Client(BrokerSettings(redis_url=url_of(server, "client"))) as client:
            sent = [client.submit(f"the wheel {number}", model="tiny") for number in range(3)]
        (taken,) = Leases(worker, lease_seconds=600, delivery_limit=5).fetch(queue_lists("headrace.tiny"), 1)
        StreamWriter(worker, 600).claim(sent[0], "w")
    with connect(server.url) as admin:
        before = contents(admin)
    (backup,), (restore,) = blocks("Backup"), blocks("Restore")
    run(tmp_path, server.port, backup)
    server.stop()

    (tmp_path / "data").mkdir()
    port = free_port()
    run(tmp_path, port, restore, DATA=str(tmp_path / "data"), ACL=str(tmp_path / "users.acl"))
    start = [PROGRAM, "--dir", "data", "--appendonly", "yes", "--save", "", "--aclfile", str(tmp_path / "users.acl")]
    started = subprocess.Popen([*start, "--port", str(port)], cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        run(tmp_path, port, 'until [ "$(redis PING)" = PONG ]; do sleep 0.05; done')
        with connect(url_at(port, "admin")) as admin:
            assert contents(admin) == before
        with connect(url_at(port, "worker")) as worker:
            left = Leases(worker, lease_seconds=600, delivery_limit=5).fetch(queue_lists("headrace.tiny"), 9)
        assert len(left) == len(sent) - 1
        assert taken.lease_id not in {lease.lease_id for lease in left}
    finally:
        started.terminate()
        started.wait(60)


def test_a_password_changes_without_an_interruption(server: EmbeddedServer, tmp_path: Path) -> None:
    add, remove, end = blocks("Change a password")
    old, new = url_of(server, "worker"), url_of(server, "worker").replace("secret", "changed")
    passwords = {"OLD": "secret", "NEW": "changed"}
    with connect(old) as connected:
        connected.hset("headrace:models", "tiny", "{}")
        run(tmp_path, server.port, add, **passwords)
        for url in (old, new):
            with connect(url) as worker:
                assert worker.hget("headrace:models", "tiny") == b"{}"
        run(tmp_path, server.port, remove, **passwords)
        assert connected.hget("headrace:models", "tiny") == b"{}"  # its connection is open
        with connect(old) as late, pytest.raises(redis.AuthenticationError):
            late.ping()
        run(tmp_path, server.port, end, **passwords)
        with pytest.raises(redis.AuthenticationError):
            connected.ping()
    server.stop()
    server.start()
    with connect(new) as worker:
        assert worker.hget("headrace:models", "tiny") == b"{}"
    with connect(old) as worker, pytest.raises(redis.AuthenticationError):
        worker.ping()
