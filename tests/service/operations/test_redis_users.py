"""The Redis users of docker-compose.yml on real servers: each role works, and can do nothing but its own."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import yaml

from headrace_broker.client import Client
from headrace_broker.connections import connect
from headrace_broker.embedded import EmbeddedServer
from headrace_broker.settings import BrokerSettings
from headrace_workers.exporter import Exporter
from service.servers import EVERY_PROGRAM, make_server
from service.workers.conftest import model_folder
from service.workers.service import Service

__all__ = ["model_folder"]

COMPOSE = Path(__file__).resolve().parents[3] / "docker-compose.yml"


def users() -> dict[str, list[str]]:
    """Their rules by name, with the password `secret`."""
    lines = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["configs"]["redis-users"]["content"].splitlines()
    rules = [re.sub(r"\$\{[^}]*\}", "secret", line).split() for line in lines]
    return {words[1]: words[2:] for words in rules}


@pytest.fixture(scope="module", params=EVERY_PROGRAM)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """Started with the file, as the container is: a rule that a server does not know would stop its start."""
    acl = tmp_path_factory.mktemp("acl") / "users.acl"
    named = {name: rules for name, rules in users().items() if name != "default"}
    acl.write_text("".join(f"user {name} {' '.join(rules)}\n" for name, rules in named.items()), encoding="utf-8")
    with make_server(program=request.param, arguments=["--aclfile", str(acl)]) as running:
        with connect(running.url) as first:  # the one user that the server needs until it has been asked how it is
            first.execute_command("ACL", "SETUSER", "default", *users()["default"])
        yield running


def url_of(server: EmbeddedServer, user: str) -> str:
    return server.url.replace("redis://", f"redis://{user}:secret@")


def test_only_the_named_users_exist_and_the_default_one_is_off() -> None:
    assert set(users()) == {"default", "admin", "worker", "client", "exporter"}
    assert users()["default"] == ["off"]


def test_nobody_gets_in_without_a_name_and_a_password(server: EmbeddedServer) -> None:
    with connect(server.url) as anonymous, pytest.raises(redis.exceptions.AuthenticationError):
        anonymous.ping()
    impostor = connect(server.url.replace("redis://", "redis://worker:wrong@"))
    with impostor, pytest.raises(redis.exceptions.AuthenticationError):
        impostor.ping()


def test_a_request_goes_all_the_way_with_each_part_under_its_own_user(
    server: EmbeddedServer, model_folder: str, tmp_path: Path
) -> None:
    service = Service(server, model_folder, tmp_path, url=url_of(server, "admin"))
    try:
        worker = service.start_worker(redis_url=url_of(server, "worker")).wait_ready()
        settings = BrokerSettings(url_of(server, "client"), max_queued_requests=9, max_queued_requests_per_tenant=9)
        with Client(settings, model="tiny") as client:
            request_id = client.submit("the wheel", {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True})
            assert sum(len(chunk.token_ids) for chunk in client.stream(request_id, timeout=30)) == 4
            assert client.result(request_id, timeout=30).usage is not None
        with connect(url_of(server, "exporter")) as reader:
            exporter = Exporter(reader, port=0)
            exporter.poll()
            assert b"headrace_exporter_redis_up 1.0" in exporter.exposition.exposition()
        assert "NoPermission" not in worker.log_text()
        assert "permissions" not in worker.log_text()
        # Celery's remote control is for the admin: it can be asked, and stops workers
        answered = service.app.control.inspect(timeout=5, limit=1).ping()
        assert answered
    finally:
        service.close()


@pytest.mark.parametrize(
    ("user", "command"),
    [
        ("exporter", ["SET", "headrace.x", "1"]),
        ("exporter", ["LPUSH", "headrace.x", "1"]),
        ("exporter", ["GET", "celery-task-meta-x"]),
        ("exporter", ["FLUSHALL"]),
        ("client", ["FLUSHALL"]),
        ("client", ["KEYS", "*"]),
        ("client", ["PUBLISH", "/0.celery.pidbox", "shutdown"]),
        ("client", ["CONFIG", "GET", "*"]),
        ("worker", ["FLUSHALL"]),
        ("worker", ["CONFIG", "SET", "maxmemory", "1"]),
        ("worker", ["GET", "somebody-else"]),
        ("worker", ["ACL", "LIST"]),
        ("client", ["SHUTDOWN"]),
        ("client", ["CLIENT", "KILL", "TYPE", "normal"]),
        ("exporter", ["XRANGE", "headrace:stream:x", "-", "+"]),
    ],
)
def test_what_is_not_a_users_business_is_refused(server: EmbeddedServer, user: str, command: list[str]) -> None:
    with connect(url_of(server, user)) as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command)
