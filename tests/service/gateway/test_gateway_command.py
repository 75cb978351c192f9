"""`headrace gateway` as a process: how it starts, what it shows, and how it ends."""

import http.client
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import redis

from headrace_broker.keys import queue_lists
from headrace_broker.models.registry import register_model
from headrace_broker.queue.leases import Leases
from headrace_broker.results import Usage
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.streams.writer import StreamWrite, StreamWriter
from service.gateway.gateway_process import PATIENCE, GatewayProcess
from service.gateway.in_process import bearer, write_keys

BODY = {"model": "tiny", "prompt": "a", "max_tokens": 9, "stream": True}
HEADERS = {"Content-Type": "application/json"}


@pytest.fixture
def replicas(redis_server: EmbeddedServer, tmp_path: Path) -> Iterator[tuple[GatewayProcess, GatewayProcess]]:
    keys = write_keys(tmp_path / "keys", "web", tokens_per_minute="1000")
    (tmp_path / "key").write_text(keys["web"])
    made = [
        GatewayProcess(redis_url=redis_server.url, log=tmp_path / f"{name}.log", keys=tmp_path / "keys", shutdown=1)
        for name in "ab"
    ]
    yield made[0].wait_ready(), made[1].wait_ready()
    for replica in made:
        replica.close()


@pytest.fixture
def headers(replicas: object, tmp_path: Path) -> dict[str, str]:
    return HEADERS | bearer((tmp_path / "key").read_text())


@contextmanager
def sent(
    replica: GatewayProcess, method: str, path: str, headers: dict[str, str], body: object = None
) -> Iterator[http.client.HTTPConnection]:
    with closing(http.client.HTTPConnection("127.0.0.1", replica.port, timeout=PATIENCE)) as connection:
        connection.request(method, path, json.dumps(body) if body else None, headers)
        yield connection


def take(client: "redis.Redis") -> str:
    """Lease the next request in the queue, as a worker does, and return its id."""
    leases = Leases(client, lease_seconds=60, delivery_limit=5)
    while not (found := leases.fetch(queue_lists("headrace.tiny"), 1)):
        time.sleep(0.005)
    request_id: str = json.loads(found[0].body)["headers"]["id"]
    return request_id


def begin(client: "redis.Redis", request_id: str) -> None:
    """Plays a worker that has published four tokens."""
    writer = StreamWriter(client, 600)
    attempt = writer.claim(request_id, "w").attempt
    writer.publish([StreamWrite.chunk(request_id, attempt, 4, index=0, token_ids=[1, 2, 3, 4], text="four")])


def end(client: "redis.Redis", request_id: str) -> None:
    """Publish the rest as that worker."""
    ended = StreamWrite.end(request_id, 1, 4, finish_reason="stop", usage=Usage(3, 0, 4))
    StreamWriter(client, 600).publish([ended])


def test_a_stopping_replica_cuts_its_streams_so_that_clients_rejoin_elsewhere(
    replicas: tuple[GatewayProcess, GatewayProcess], headers: dict[str, str], redis_client: "redis.Redis"
) -> None:
    register_model(redis_client, "tiny", max_model_len=99, worker="w", seen=5.0)
    whole = {**BODY, "stream": False}
    with (
        sent(replicas[0], "POST", "/v1/completions", headers, BODY) as streaming,
        sent(replicas[0], "POST", "/v1/completions", headers, whole) as waiting,
    ):
        ids = {take(redis_client), take(redis_client)}
        for request_id in ids:
            begin(redis_client, request_id)
        stream = streaming.getresponse()
        first = stream.readline()
        assert b"four" in first
        request_id = json.loads(first.removeprefix(b"data: "))["id"]
        replicas[0].close()
        assert replicas[0].process.returncode == 0, replicas[0].log_text()
        with pytest.raises(http.client.IncompleteRead) as incomplete:
            stream.read()
        assert b"[DONE]" not in incomplete.value.partial
        refused = waiting.getresponse()
        assert (refused.status, json.loads(refused.read())["error"]["code"]) == (503, "stopping")
    lines = [json.loads(line) for line in replicas[0].log_text().splitlines()]
    assert [line for line in lines if line["level"] in ("error", "critical")] == []
    cut = {line["id"] for line in lines if line["event"] == "request cut off by shutdown"}
    answered = [line for line in lines if line["event"] == "request answered" and line["endpoint"] == "completions"]
    assert {line["id"] for line in answered} == cut
    assert {line["status"] for line in answered} == {200, 503}

    with sent(replicas[1], "GET", f"/v1/completions/{request_id}?stream=true", headers) as rejoining:
        rejoined = rejoining.getresponse()
        assert rejoined.readline() == first
        end(redis_client, request_id)
        assert rejoined.read().endswith(b"data: [DONE]\n\n")


def test_tokens_are_charged_even_if_the_client_disconnects(
    replicas: tuple[GatewayProcess, GatewayProcess], headers: dict[str, str], redis_client: "redis.Redis"
) -> None:
    register_model(redis_client, "tiny", max_model_len=99, worker="w", seen=5.0)
    with sent(replicas[0], "POST", "/v1/completions", headers, BODY) as streaming:
        request_id = take(redis_client)
        begin(redis_client, request_id)
        response = streaming.getresponse()
        assert response.getheader("x-ratelimit-limit-tokens") == "1000"
        assert response.getheader("x-ratelimit-limit-requests") is None
        response.readline()
    charged = f"headrace:gw:charged:{request_id}"
    while redis_client.get(charged) is None:
        time.sleep(0.005)
    assert redis_client.get(charged) == b"4"
    end(redis_client, request_id)
    for replica in replicas:
        with sent(replica, "GET", f"/v1/completions/{request_id}", headers) as reading:
            assert reading.getresponse().read()
    assert redis_client.get(charged) == b"7"


def test_a_stopping_replica_charges_the_tokens_of_its_open_answers(
    replicas: tuple[GatewayProcess, GatewayProcess], headers: dict[str, str], redis_client: "redis.Redis"
) -> None:
    register_model(redis_client, "tiny", max_model_len=99, worker="w", seen=5.0)
    with sent(replicas[0], "POST", "/v1/completions", headers, BODY) as streaming:
        request_id = take(redis_client)
        begin(redis_client, request_id)
        streaming.getresponse().readline()
        redis_client.client_pause(3000, all=False)  # writes wait until after `shutdown`
        replicas[0].close()
    assert redis_client.get(f"headrace:gw:charged:{request_id}") == b"4"


def test_metrics_have_a_port_of_their_own(redis_server: EmbeddedServer, tmp_path: Path) -> None:
    gateway = GatewayProcess(redis_url=redis_server.url, log=tmp_path / "log", metrics_port=0).wait_ready()
    try:
        (port,) = re.findall(r"metrics on http://127.0.0.1:(\d+)/metrics", gateway.log_text())
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            shown = answer.read()
        assert b"headrace_gateway_redis_up 1.0" in shown
        assert b"headrace_gateway_open_streams 0.0" in shown
        assert gateway.get("/metrics") == 404
    finally:
        gateway.close()


def test_a_body_with_too_large_a_content_length_is_refused_before_it_arrives(
    replicas: tuple[GatewayProcess, GatewayProcess], headers: dict[str, str]
) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", replicas[0].port, timeout=PATIENCE)) as connection:
        connection.putrequest("POST", "/v1/completions")
        for name, value in (headers | {"Content-Length": str(10 * 2**20)}).items():
            connection.putheader(name, value)
        connection.endheaders()
        assert connection.getresponse().status == 413


WRONG = [
    (["--host", "0.0.0.0"], "loopback"),
    (["--keys", "/none/such"], "No such file"),
    (["--redis-url", "nonsense://x"], "redis_url"),
    (["--allow-origin", "chat.example.org"], "allow_origin"),
    (["--max-body-bytes", "1"], "max_body_bytes must be an integer of at least 1024, got 1"),
]


@pytest.mark.parametrize(("arguments", "sentence"), WRONG)
def test_an_invalid_setting_ends_it_with_one_message(arguments: list[str], sentence: str) -> None:
    command = [sys.executable, "-c", "from headrace_cli.main import main; main()", "gateway", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("headrace: ")
    assert sentence in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_new_key_and_its_entry_go_to_different_outputs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from headrace_cli.main import main; main()", "gateway-key", "web"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert "sk-headrace-" in made.stderr
    assert "sk-headrace-" not in made.stdout
    assert made.stdout.startswith('[[keys]]\nname = "web"\nsha256 = "')


ONLY_THE_EXTRA = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        absent = "torch transformers tokenizers numpy pydantic rich headrace_engine"
        if name.partition(".")[0] in absent.split():
            raise ModuleNotFoundError(f"no {name}", name=name)

sys.meta_path.insert(0, Absent())
from headrace_cli.main import main

sys.argv = ["headrace", "gateway", "--help"]
main()
"""


def test_the_command_needs_only_the_gateway_extra() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", ONLY_THE_EXTRA], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert "--max-body-bytes" in shown.stdout
