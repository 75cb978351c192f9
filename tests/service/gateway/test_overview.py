"""The state that operators and the page can read over HTTP, by key."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx2
import pytest
import redis

from headrace_broker import Client
from headrace_broker.keys import queue_lists, queue_name
from headrace_broker.models.registry import register_model
from headrace_broker.queue.leases import Leases
from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import EmbeddedServer, free_port
from headrace_gateway.keys.api_key import ApiKey
from headrace_wire.codes import DeadLetterReason
from service.gateway.in_process import running_app
from service.gateway.page.scripted import ID, Script, ScriptedGateway

KEYS = {
    "admin": ApiKey("root", is_admin=True),
    "acme": ApiKey("acme", tenant="acme", models=frozenset({"m"})),
    "globex": ApiKey("globex", tenant="globex"),
}

Ask = Callable[..., httpx2.Response]


@pytest.fixture
def ask(redis_server: EmbeddedServer) -> Iterator[Ask]:
    """Sends requests with one key."""
    with connect(redis_server.url) as redis_client:
        for name in ("m", "other"):
            register_model(redis_client, name, max_model_len=64, worker="worker@host", seen=5.0)
    with ExitStack() as stack:
        gateway = stack.enter_context(ScriptedGateway(Script(), redis_server.url, free_port(), keys=KEYS))
        http = stack.enter_context(httpx2.Client(base_url=gateway.url))

        def ask(key: str, path: str, json: Any = None) -> httpx2.Response:
            headers = {"Authorization": f"Bearer {key}"}
            return http.get(path, headers=headers) if json is None else http.post(path, headers=headers, json=json)

        yield ask


@pytest.fixture
def client(redis_server: EmbeddedServer) -> Iterator[Client]:
    with Client(redis_server.url, model="m") as client:
        yield client


def dead_letter(client: Client, redis_client: "redis.Redis", request_id: str) -> None:
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=5)
    client.submit("the wheel Zanzibar", request_id=request_id, tenant="acme")
    [message] = leases.fetch(queue_lists(queue_name("m")), 1)
    leases.dead_letter(message.lease_id, DeadLetterReason.POISON)


def told(answer: httpx2.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_an_overview_has_the_state_of_every_queue(ask: Ask, client: Client, redis_client: "redis.Redis") -> None:
    dead_letter(client, redis_client, "dead")
    client.submit("x", priority=3, tenant="acme")
    client.submit("x", tenant="globex")
    Leases(redis_client, lease_seconds=60, delivery_limit=5).fetch(queue_lists(queue_name("m")), 1)
    found = ask("admin", "/headrace/overview").json()
    assert found["is_admin"] is True
    first, second = found["queues"]
    assert (first["model"], second["model"]) == ("m", "other")
    assert (first["waiting"], first["running"], first["dead"], first["delayed"]) == (1, 1, 1, 0)
    assert first["by_priority"] == {"0": 0, "3": 1, "6": 0, "9": 0}
    assert first["by_tenant"] == {"acme": 1}
    assert (first["worker"], first["seen"], first["max_model_len"]) == ("worker@host", 5.0, 64)
    assert first["oldest_age_seconds"] >= 0


async def test_a_page_that_polls_does_not_fill_the_log(
    redis_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headrace_gateway.http.request_log")
    async with running_app(redis_server.url) as (_, client):
        assert (await client.get("/headrace/overview")).status_code == 200
        assert caplog.messages == []
        assert (await client.get("/headrace/overview", headers={"Host": "evil.example"})).status_code == 403
        assert (await client.get("/headrace/dead-letters")).status_code == 200
    assert len(caplog.messages) == 2


def test_other_keys_see_their_models_without_tenants_and_workers(ask: Ask) -> None:
    found = ask("acme", "/headrace/overview").json()
    assert found["is_admin"] is False
    [queue] = found["queues"]
    assert queue["model"] == "m"
    assert not {"by_tenant", "worker"} & queue.keys()


def test_a_queue_with_a_broken_key_is_reported_and_the_others_are_read(ask: Ask, redis_client: "redis.Redis") -> None:
    redis_client.set("headrace:queue:waiting:headrace.m", "nonsense")
    first, second = ask("admin", "/headrace/overview").json()["queues"]
    assert "headrace:queue:waiting:headrace.m" in first["problem"]
    assert second["problem"] is None


@pytest.mark.parametrize("path", ["requeue", "purge"])
def test_dead_letters_are_for_admin_keys(ask: Ask, path: str) -> None:
    for answer in (
        ask("acme", "/headrace/dead-letters"),
        ask("acme", f"/headrace/dead-letters/{path}", {"letter_ids": []}),
    ):
        error = told(answer, 403)
        assert (error["type"], error["code"]) == ("permission_error", "admin_key_required")


def test_dead_letters_are_listed_without_their_messages(ask: Ask, client: Client, redis_client: "redis.Redis") -> None:
    for request_id in "abc":
        dead_letter(client, redis_client, request_id)
    answer = ask("admin", "/headrace/dead-letters?limit=2")
    assert [letter["request_id"] for letter in answer.json()["data"]] == ["c", "b"]
    assert answer.json()["data"][0]["tenant"] == "acme"
    assert "Zanzibar" not in answer.text
    for limit in ("0", "1001", "x", "-1", "", "9" * 5000):
        assert told(ask("admin", f"/headrace/dead-letters?limit={limit}"), 400)["param"] == "limit"


def test_selected_dead_letters_are_requeued_and_purged(ask: Ask, client: Client, redis_client: "redis.Redis") -> None:
    for request_id in "abc":
        dead_letter(client, redis_client, request_id)
    c, b, a = (letter.letter_id for letter in client.dead_letters())
    assert ask("admin", "/headrace/dead-letters/requeue", {"letter_ids": [a]}).json()["requeued"] == [a]
    assert ask("admin", "/headrace/dead-letters/purge", {"letter_ids": [b, b]}).json()["purged"] == 1
    assert a in told(ask("admin", "/headrace/dead-letters/purge", {"letter_ids": [c, a]}), 404)["message"]
    assert [letter.letter_id for letter in client.dead_letters()] == [c]


@pytest.mark.parametrize("body", [{}, {"letter_ids": "abc"}, {"letter_ids": [1]}, {"letter_ids": [], "all": True}])
def test_a_body_that_is_not_a_selection_is_refused(ask: Ask, body: Any) -> None:
    assert told(ask("admin", "/headrace/dead-letters/purge", body), 400)["param"] == "letter_ids"


def test_a_request_is_shown_to_its_own_key_and_to_administrators(ask: Ask, client: Client) -> None:
    ask("acme", "/v1/chat/completions", {"model": "m"})
    client.submit("the wheel Zanzibar", request_id=ID)
    for key in ("acme", "admin"):
        answer = ask(key, f"/headrace/requests/{ID}")
        [one] = answer.json()["requests"]
        assert one == {"id": ID, "state": "pending", "attempt": 0, "tokens": 0, "rows": 0, "finish_reason": None}
        assert "Zanzibar" not in answer.text


@pytest.mark.parametrize("end", ["", "/cancel"])
def test_a_request_of_another_key_is_not_found(ask: Ask, client: Client, end: str) -> None:
    ask("acme", "/v1/chat/completions", {"model": "m"})
    client.submit("x", request_id=ID)
    client.submit("x", request_id="from-celery")
    body = {} if end else None
    foreign = told(ask("globex", f"/headrace/requests/{ID}{end}", body), 404)
    absent = told(ask("globex", f"/headrace/requests/none{end}", body), 404)
    assert foreign["message"].replace(ID, "none") == absent["message"]
    told(ask("globex", f"/headrace/requests/from-celery{end}", body), 404)
    assert client.status(ID).state == client.status("from-celery").state == "pending"


def test_a_request_is_cancelled_by_its_own_key_and_every_one_by_administrators(ask: Ask, client: Client) -> None:
    ask("acme", "/v1/chat/completions", {"model": "m"})
    client.submit("x", request_id=ID)
    client.submit("x", request_id="from-celery")
    for key, request_id in (("acme", ID), ("admin", "from-celery")):
        assert ask(key, f"/headrace/requests/{request_id}/cancel", {}).json()["cancelled"] is True
        assert client.status(request_id).finish_reason == "cancelled"
    told(ask("admin", "/headrace/requests/unknown/cancel", {}), 404)
    assert client.is_known("unknown") is False
