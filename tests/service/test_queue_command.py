"""`headrace queue` against a real server: what it lists, and what the clients of purged requests get."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from click.testing import CliRunner, Result

from headrace_broker.client.client import Client
from headrace_broker.keys import dead_letters_key, lease_meta_key, queue_lists, queue_name, result_key
from headrace_broker.models.registry import register_model
from headrace_broker.queue.leases import Leases
from headrace_broker.results import RequestFailedError
from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import EmbeddedServer
from headrace_cli.commands.queue import queue
from service.servers import make_server

MODEL = "m"
LISTS = queue_lists(queue_name(MODEL))


@pytest.fixture
def client(redis_server: EmbeddedServer) -> Iterator[Client]:
    with Client(redis_server.url, model=MODEL) as client:
        yield client


@pytest.fixture
def leases(redis_client: "redis.Redis") -> Leases:
    return Leases(redis_client, lease_seconds=60, delivery_limit=5)


def fill(client: Client, leases: Leases) -> None:
    """Make one running request, one delayed, four sorted and two unsorted ones."""
    for request_id in ("running", "delayed"):
        client.submit("x", request_id=request_id, tenant="acme")
    running, delayed = leases.fetch(LISTS, 2)
    leases.hold(running.lease_id, running)
    leases.postpone(delayed.lease_id, 3000)
    for number in range(4):
        client.submit("x", request_id=f"sorted-{number}", priority=5, tenant="acme" if number % 2 else None)
    leases.sort(LISTS)
    for number in range(2):
        client.submit("x", request_id=f"unsorted-{number}")


def run(server: EmbeddedServer, *arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(queue, [*arguments, "--redis-url", server.url], input=answer)


def shown(server: EmbeddedServer) -> dict[str, Any]:
    [found] = json.loads(run(server, "list", "--model", MODEL, "--json").stdout)
    return dict(found)


def test_a_queue_is_listed_by_priority_and_tenant(
    client: Client, leases: Leases, redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    assert json.loads(run(redis_server, "list", "--json").stdout) == []
    fill(client, leases)
    register_model(redis_client, MODEL, max_model_len=8, worker="w", seen=1.0)
    found = shown(redis_server)
    assert {name: found[name] for name in ("waiting", "delayed", "running", "dead")} == {
        "waiting": 6,
        "delayed": 1,
        "running": 1,
        "dead": 0,
    }
    assert found["by_priority"] == {"0": 2, "3": 4, "6": 0, "9": 0}
    assert found["by_tenant"] == {"": 2, "acme": 2}
    assert found["oldest_age_seconds"] > 0
    plain = run(redis_server, "list").stdout
    assert MODEL in plain
    assert "acme: 2" in plain


def test_a_purge_cancels_the_requests_that_no_worker_runs_and_tells_their_clients(
    client: Client, leases: Leases, redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    fill(client, leases)
    outcome = run(redis_server, "purge", MODEL, "--yes", "--json")
    assert (outcome.exit_code, json.loads(outcome.stdout)) == (0, {"waiting": 6, "delayed": 1})
    assert [shown(redis_server)[name] for name in ("waiting", "delayed", "running")] == [0, 0, 1]
    for request_id in ("sorted-0", "unsorted-1", "delayed"):
        assert client.status(request_id).finish_reason == "cancelled"
        with pytest.raises(RequestFailedError, match="purged from the queue"):
            client.result(request_id, timeout=5)
    assert client.status("running").state == "pending"
    [held] = leases.held()
    leases.ack(held)
    assert redis_client.keys("headrace:lease:*") + redis_client.keys("headrace:queue:*") == []
    assert redis_client.exists(dead_letters_key(queue_name(MODEL))) == 0


def test_a_purge_asks_for_confirmation(client: Client, leases: Leases, redis_server: EmbeddedServer) -> None:
    fill(client, leases)
    refused = run(redis_server, "purge", MODEL, answer="n\n")
    assert (refused.exit_code, shown(redis_server)["waiting"]) == (1, 6)
    assert "Delete 7 waiting or delayed request(s) of m?" in refused.output
    agreed = run(redis_server, "purge", MODEL, answer="y\n")
    assert agreed.exit_code == 0
    assert "7 purged, 1 of them delayed" in agreed.output


def test_the_queue_of_an_unknown_model_is_not_purged(redis_server: EmbeddedServer) -> None:
    outcome = run(redis_server, "purge", "nosuch", "--yes")
    assert outcome.exit_code == 1
    assert "no worker has ever served a model 'nosuch' here" in outcome.output


def test_a_json_producer_can_read_that_its_request_was_purged(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", client: Client
) -> None:
    with Celery(broker=redis_server.url, set_as_current=False) as app:
        handle = app.send_task("headrace.generate", kwargs={"prompt": "x"}, queue=queue_name(MODEL))
    assert client.purge_queue().waiting == 1
    stored = json.loads(redis_client.get(result_key(handle.id)) or b"")
    assert (stored["status"], stored["result"]["error"]["code"]) == ("SUCCESS", "cancelled")


def test_an_unreadable_message_is_purged_too(
    client: Client, redis_client: "redis.Redis", redis_server: EmbeddedServer
) -> None:
    redis_client.lpush(LISTS[0], b"\xff", "{}", "[]", '{"headers": {"id": 7}}', '{"headers": {"id": ""}}')
    assert client.purge_queue().waiting == 5
    assert shown(redis_server)["waiting"] == 0


def test_a_purge_ends_no_request_of_another_message(
    client: Client, leases: Leases, redis_client: "redis.Redis", redis_server: EmbeddedServer
) -> None:
    client.submit("x", request_id="theirs")
    assert len(leases.fetch(LISTS, 1)) == 1
    headers = {"id": "theirs", "task": "headrace.generate", "padding": "x" * 300_000}  # more than the scripts read
    redis_client.lpush(LISTS[0], json.dumps({"headers": headers, "properties": {"delivery_info": {}}, "body": ""}))
    assert client.purge_queue().waiting == 1
    assert client.status("theirs").state == "pending"
    assert redis_client.exists(result_key("theirs")) == 0
    assert [letter.reason for letter in client.dead_letters()] == ["duplicate id"]
    assert shown(redis_server)["waiting"] == 0


def test_a_purge_reports_a_message_that_is_too_large(client: Client, redis_client: "redis.Redis") -> None:
    client.submit("x", request_id="large")
    envelope = json.loads(redis_client.lpop(LISTS[0]))
    redis_client.lpush(LISTS[0], json.dumps({**envelope, "body": "x" * (8 << 20)}))
    client.purge_queue()
    assert client.status("large").finish_reason == "error"
    with pytest.raises(RequestFailedError, match="given up before its first delivery: too large"):
        client.result("large", timeout=5)


def test_a_queue_that_cannot_be_served_is_listed_with_its_problem(
    client: Client, leases: Leases, redis_client: "redis.Redis", redis_server: EmbeddedServer
) -> None:
    fill(client, leases)
    redis_client.rename(lease_meta_key(queue_name(MODEL)), "kept")
    redis_client.set(lease_meta_key(queue_name(MODEL)), "x")
    assert "WRONGTYPE" in shown(redis_server)["problem"]
    assert "WRONGTYPE" in str(run(redis_server, "purge", MODEL, "--yes").exception)
    redis_client.rename("kept", lease_meta_key(queue_name(MODEL)))
    assert shown(redis_server)["waiting"] == 6


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ({"sep": ":"}, "headrace.m:3"),
        ({"sep": "--"}, "headrace.m--3"),
        ({"global_keyprefix": "team:"}, "team:headrace.m\x06\x163"),
    ],
)
def test_lists_that_a_setting_of_a_producer_hides_from_the_workers_are_listed(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", option: dict[str, str], key: str
) -> None:
    register_model(redis_client, MODEL, max_model_len=9, worker="w", seen=5.0)
    register_model(redis_client, "m:9", max_model_len=9, worker="w", seen=5.0)
    for options, queues in (option, [MODEL]), ({}, [MODEL, "m:9", "m-3"]):
        app = Celery("producer", broker=redis_server.url, set_as_current=False)
        app.conf.broker_transport_options = options
        for name in queues:
            app.send_task("headrace.generate", kwargs={"prompt": "x"}, queue=queue_name(name), priority=4)
    found = json.loads(run(redis_server, "list", "--model", MODEL, "--json").output)
    assert found[0]["unread"] == {key: 1}
    listed = run(redis_server, "list")
    assert f"no worker reads the list {key!r}, which has 1 message(s)" in listed.output


def test_messages_on_the_main_server_for_a_queue_of_another_server_are_listed(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    register_model(redis_client, MODEL, max_model_len=9, worker="w", seen=5.0)
    redis_client.lpush(LISTS[0], "{}", "{}")
    redis_client.lpush(f"{LISTS[0]}:3", "{}")
    with make_server() as second, connect(second.url) as other:
        other.lpush(f"{LISTS[0]}:3", "{}")
        monkeypatch.setenv("HEADRACE_QUEUE_URLS", f"{MODEL}={second.url}")
        found = shown(redis_server)
        assert (found["waiting"], found["unread"]) == (0, {LISTS[0]: 2, f"{LISTS[0]}:3": 2})
        listed = run(redis_server, "list").output
    assert f"the list {LISTS[0]!r}, which has 2 message(s): its producers send to the main server" in listed
