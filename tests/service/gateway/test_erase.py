"""`headrace erase`: nothing of a tenant is left in Redis and in the gateway's folder of files; others keep theirs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click.testing
import httpx2
import pytest
import redis

from headrace_broker import Client
from headrace_broker.keys import QUEUE_PREFIX
from headrace_broker.usage.ledger import DAY, read_usage
from headrace_cli.commands.erase import erase
from headrace_gateway.keys.key_file import new_key
from service.gateway.gateway_process import GatewayProcess
from service.servers import make_server
from service.workers.service import QUEUE, Service, results

pytestmark = pytest.mark.rotated("cli/headrace_cli/erase", "broker/headrace_broker/usage")

TENANTS = ("acme", "beta")
MARKS = {"acme": "acme-own-words", "beta": "beta-own-words"}


class Tenancy:
    """A gateway with a key for each tenant, before a queue."""

    def __init__(self, service: Service, folder: Path) -> None:
        self.service, self.files, self.key_file = service, folder / "files", folder / "keys"
        self.files.mkdir()
        made = {tenant: new_key(f"{tenant}-key", tenant=tenant) for tenant in TENANTS}
        self.key_file.write_text("".join(entry for _, entry in made.values()))
        self.replica = GatewayProcess(
            redis_url=service.url, log=folder / "gateway.log", keys=self.key_file, files=self.files
        )
        self.clients = {
            tenant: httpx2.Client(
                base_url=self.replica.wait_ready().url, headers={"Authorization": f"Bearer {key}"}, timeout=150
            )
            for tenant, (key, _) in made.items()
        }

    def post(self, tenant: str, path: str, **body: Any) -> Any:
        answer = self.clients[tenant].post(path, json={"model": "tiny", **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def fill(self, tenant: str) -> None:
        """Leave something of every kind."""
        mark = MARKS[tenant]
        headers, params = {"tenant": tenant}, {"max_tokens": 3}
        plain = self.service.send({"prompt": mark, "sampling_params": params}, headers=headers)
        refused = self.service.send({"prompt": mark, "sampling_params": {"max_tokens": mark}}, headers=headers)
        results([plain, refused])
        with Client(self.service.url, model="tiny") as client:
            options: Any = {"tenant": tenant, "idempotency_key": mark, "abandon_after": 600}
            client.result(client.submit(mark, params, **options), timeout=150)
        self.post(tenant, "/v1/chat/completions", messages=[{"role": "user", "content": mark}], max_tokens=3)
        self.post(tenant, "/v1/responses", input=mark, instructions=mark, max_output_tokens=3)
        self.post(tenant, "/v1/responses", input=mark, store=False, max_output_tokens=3)
        line = {"custom_id": mark, "method": "POST", "url": "/v1/completions"}
        line["body"] = {"model": "tiny", "prompt": mark, "max_tokens": 2}  # type: ignore[assignment]
        files = {"file": ("in.jsonl", json.dumps(line)), "purpose": (None, "batch")}
        file_id = self.clients[tenant].post("/v1/files", files=files).json()["id"]
        asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch_id = self.clients[tenant].post("/v1/batches", json=asked).json()["id"]
        self.service.wait_until(
            lambda: self.clients[tenant].get(f"/v1/batches/{batch_id}").json()["status"] == "completed"
        )
        dead = {"headers": {"tenant": tenant, "id": f"dead-{tenant}"}, "body": mark, "properties": {}}
        self.service.client.lpush(QUEUE, json.dumps(dead))
        self.service.wait_settled()

    def run(self, *args: str) -> click.testing.Result:
        options = ["--files", str(self.files), "--keys", str(self.key_file), "--json", "--yes"]
        environ = {"HEADRACE_REDIS_URL": self.service.url}
        return click.testing.CliRunner().invoke(erase, ["--tenant", "acme", *options, *args], env=environ)

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        self.replica.close()


@pytest.fixture
def tenancy(model_folder: str, tmp_path: Path) -> Iterator[Tenancy]:
    with make_server() as server:
        service = Service(server, model_folder, tmp_path)
        try:
            made = Tenancy(service, tmp_path)
            yield made
            made.close()
        finally:
            service.close()


def dumped(client: "redis.Redis") -> dict[bytes, bytes]:
    """Return all that each key of the server holds, as one text."""
    read = {
        b"string": client.get,
        b"hash": client.hgetall,
        b"list": lambda key: client.lrange(key, 0, -1),
        b"set": client.smembers,
        b"zset": lambda key: client.zrange(key, 0, -1),
        b"stream": client.xrange,
    }
    return {key: key + repr(read[client.type(key)](key)).encode() for key in client.scan_iter()}


def having(client: "redis.Redis", *texts: str) -> list[bytes]:
    return [key for key, text in dumped(client).items() if any(each.encode() in text for each in texts)]


def test_nothing_of_an_erased_tenant_is_left_and_others_keep_theirs(tenancy: Tenancy) -> None:
    service, client = tenancy.service, tenancy.service.client
    service.start_worker().wait_ready()
    for tenant in TENANTS:
        tenancy.fill(tenant)
    before = {tenant: having(client, tenant) for tenant in TENANTS}
    assert all(having(client, mark) for mark in MARKS.values())
    beta = {key: text for key, text in dumped(client).items() if b"beta" in text and b"acme" not in text}
    now = client.time()[0]
    sums = [
        counts.prompt_tokens + counts.completion_tokens
        for counts in read_usage([client], DAY, now - DAY, now + DAY).values()
    ]
    ids = {key.rpartition(b":")[2].decode() for key in before["acme"] if b":stream:" in key or b":gw:req:" in key}

    outcome = tenancy.run()
    assert outcome.exit_code == 0, outcome.output
    told = json.loads(outcome.stdout)
    assert told["left"] == []
    kinds = {"streams", "results", "responses", "envelopes", "batches", "dead letters", "idempotency keys"}
    assert kinds | {"rows of the ledger", "folders of files", "lists of requests"} <= told["removed"].keys()
    assert having(client, "acme", *ids) == []
    assert not [path for path in tenancy.files.rglob("*") if path.is_file() and b"acme" in path.read_bytes()]
    assert any(path.is_file() and b"beta-own-words" in path.read_bytes() for path in tenancy.files.rglob("*"))
    left = dumped(client)
    assert {key: left[key] for key in beta if b":lease:" not in key and b":credit:" not in key} == {
        key: text for key, text in beta.items() if b":lease:" not in key and b":credit:" not in key
    }
    rows = read_usage([client], DAY, now - DAY, now + DAY)
    assert sum(counts.prompt_tokens + counts.completion_tokens for counts in rows.values()) == sum(sums)
    assert {group.tenant for group in rows} == {"(erased)", "beta"}
    again = tenancy.run()
    assert (again.exit_code, json.loads(again.stdout)["removed"]) == (0, {})


def test_open_requests_are_refused_or_cancelled(tenancy: Tenancy) -> None:
    service = tenancy.service
    handles = [service.send({"prompt": MARKS["acme"]}, headers={"tenant": "acme"}) for _ in range(3)]
    refused = tenancy.run()
    assert refused.exit_code == 1
    assert "3 request(s) and 0 batch(es) of acme are open, and nothing was removed: give --cancel" in refused.output
    nobody = tenancy.run("--cancel", "--wait", "0.1")
    assert nobody.exit_code == 1
    assert "is a worker running?" in nobody.output
    service.start_worker().wait_ready()
    outcome = tenancy.run("--cancel")
    assert outcome.exit_code == 0, outcome.output
    assert having(service.client, "acme", *(handle.id for handle in handles)) == []


def test_an_unknown_tenant_has_nothing(tenancy: Tenancy) -> None:
    outcome = tenancy.run()
    assert (outcome.exit_code, json.loads(outcome.stdout)["removed"]) == (0, {})
    wrong = click.testing.CliRunner().invoke(erase, ["--tenant", "a\nb"])
    assert wrong.exit_code == 2


def test_without_store_everything_expires(tenancy: Tenancy) -> None:
    """Every key that has text of the request or its id has a time to live, and no longer one than is documented."""
    service, client = tenancy.service, tenancy.service.client
    service.start_worker().wait_ready()
    answer = tenancy.post("acme", "/v1/responses", input=MARKS["acme"], store=False, max_output_tokens=3)
    service.wait_settled()
    found = having(client, MARKS["acme"], answer["id"])
    assert found
    assert {client.ttl(key) > 0 for key in found} == {True}
    text = having(client, MARKS["acme"])
    assert not [key for key in text if client.ttl(key) > 600], "a prompt is kept for longer than a result"
    assert not [key for key in text if key.decode().startswith(QUEUE_PREFIX)]
