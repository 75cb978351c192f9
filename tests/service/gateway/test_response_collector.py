"""How responses end: stored once, by any replica, before their stream expires, and readable by their owner only."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from headrace_broker.keys import ended_key, listener_key, stream_key
from headrace_broker.models.registry import register_model
from headrace_broker.server.embedded import EmbeddedServer
from headrace_gateway.answers.envelope import Envelope, EnvelopeStore
from headrace_gateway.answers.response_store import ResponseStore
from headrace_gateway.redis.claims import Claim, Claims
from headrace_gateway.redis.keys import response_key
from headrace_gateway.responses.collector import ResponseCollector
from headrace_monitoring.gateway_metrics import GatewayMetrics
from service.gateway.in_process import bearer, running_app, write_keys
from service.gateway.test_gateway_command import begin, end, take

BODY: dict[str, Any] = {"model": "tiny", "input": "a", "max_output_tokens": 9, "background": True}
PATH = "/v1/responses"
DUE = "headrace:gw:work:responses"


@asynccontextmanager
async def gateway_of(server: EmbeddedServer, client: "redis.Redis", **options: Any) -> AsyncIterator[tuple[Any, Any]]:
    register_model(client, "tiny", max_model_len=999, worker="w", seen=5.0)
    async with running_app(server.url, **options) as (app, http):
        yield app, http


def collector_of(
    app: Any, told: list[tuple[str, str, str]] | None = None, *, seconds: float = 30.0
) -> ResponseCollector:
    """The collector of another replica, which records its announcements."""
    gateway = app.state.gateway

    async def announce(event_type: str, object_id: str, *, key: str, tenant: str | None, at: int) -> None:
        assert (tenant, at > 0) == (None, True)
        if told is not None:
            told.append((event_type, object_id, key))

    claims = Claims(gateway.redis, "responses", seconds=seconds)
    stores = gateway.redis, gateway.streams, claims, gateway.envelopes, gateway.responses
    return ResponseCollector(*stores, GatewayMetrics(), announce, longest=9.0)


@pytest.fixture
def idle_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas whose own collectors are off."""

    async def run(_self: ResponseCollector) -> None:
        return

    monkeypatch.setattr(ResponseCollector, "run", run)


async def wait_stored(client: "redis.Redis", response_id: str) -> dict[str, Any]:
    """Return what is stored of the response's end."""
    while (packed := client.hget(response_key(response_id), "state")) is None:
        await asyncio.sleep(0.02)
    state: dict[str, Any] = json.loads(packed)
    return state


async def wait_until_nothing_is_due(client: "redis.Redis") -> None:
    while client.zcard(DUE):
        await asyncio.sleep(0.02)


async def test_a_response_outlives_its_stream(redis_server: EmbeddedServer, redis_client: "redis.Redis") -> None:
    async with gateway_of(redis_server, redis_client, store_life=5000) as (_, http):
        created = (await http.post(PATH, json=BODY)).json()
        assert created["status"] == "queued"
        request_id = await asyncio.to_thread(take, redis_client)
        assert request_id == created["id"]
        begin(redis_client, request_id)
        running = (await http.get(f"{PATH}/{request_id}")).json()
        assert (running["status"], running["output"][0]["content"][0]["text"]) == ("in_progress", "four")
        end(redis_client, request_id)
        await wait_stored(redis_client, request_id)
        whole = (await http.get(f"{PATH}/{request_id}")).json()
        redis_client.delete(stream_key(request_id))
        assert (await http.get(f"{PATH}/{request_id}")).json() == whole
        assert whole["status"] == "completed"
        refused = await http.get(f"{PATH}/{request_id}?stream=true")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "stream_expired")
        for key in (response_key(request_id), f"headrace:gw:req:{request_id}"):
            assert 4900 < redis_client.ttl(key) <= 5000
        await wait_until_nothing_is_due(redis_client)
        again = {"model": "tiny", "input": "b", "previous_response_id": request_id, "background": True}
        assert (await http.post(PATH, json=again)).status_code == 200


@pytest.mark.usefixtures("idle_replicas")
async def test_an_end_is_stored_and_announced_once_by_all_replicas_together(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    async with gateway_of(redis_server, redis_client) as (app, http):
        created = (await http.post(PATH, json=BODY)).json()["id"]
        await asyncio.to_thread(take, redis_client)
        begin(redis_client, created)
        end(redis_client, created)
        redis_client.zadd(DUE, {created: 0})
        told: list[tuple[str, str, str]] = []
        collectors = [collector_of(app, told) for _ in range(4)]
        assert sum(await asyncio.gather(*(each.collect() for each in collectors))) == 1
        assert told == [("response.completed", created, "anyone")]
        assert (await wait_stored(redis_client, created))["status"] == "completed"


async def test_a_background_response_is_charged_once_though_nobody_reads_it(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys", "web", tokens_per_minute="5")
    headers = bearer(keys["web"])
    async with gateway_of(redis_server, redis_client, keys=tmp_path / "keys") as (_, http):
        created = (await http.post(PATH, json=BODY, headers=headers)).json()["id"]
        await asyncio.to_thread(take, redis_client)
        begin(redis_client, created)
        end(redis_client, created)
        await wait_until_nothing_is_due(redis_client)
        assert redis_client.get(f"headrace:gw:charged:{created}") == b"7"
        refused = await http.post(PATH, json=BODY, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert (await http.get(f"{PATH}/{created}", headers=headers)).json()["status"] == "completed"
        level = redis_client.hget("headrace:gw:rate:web", "tokens")
        assert level is not None
        assert -2 <= float(level.split()[0]) <= -1


@pytest.mark.usefixtures("idle_replicas")
async def test_another_replica_takes_over_the_responses_of_a_killed_one(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    async with gateway_of(redis_server, redis_client) as (app, http):
        responses = app.state.gateway.responses
        created = (await http.post(PATH, json=BODY)).json()["id"]
        await asyncio.to_thread(take, redis_client)
        begin(redis_client, created)
        end(redis_client, created)
        claims = Claims(app.state.gateway.redis, "responses", seconds=0.05)
        redis_client.zadd(DUE, {created: 0})
        (of_the_dead,) = await claims.take(9)
        told: list[tuple[str, str, str]] = []
        other = collector_of(app, told)
        while not await other.collect():
            await asyncio.sleep(0.01)
        assert [event for event, _, _ in told] == ["response.completed"]
        assert not await responses.finish(of_the_dead, {"status": "failed"})
        assert (await wait_stored(redis_client, created))["status"] == "completed"


@pytest.mark.usefixtures("idle_replicas")
async def test_a_response_that_cannot_be_stored_does_not_block_others(
    redis_server: EmbeddedServer,
    redis_client: "redis.Redis",
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with gateway_of(redis_server, redis_client) as (app, http):
        created = [(await http.post(PATH, json=BODY)).json()["id"] for _ in range(3)]
        for request_id in [await asyncio.to_thread(take, redis_client) for _ in created]:
            begin(redis_client, request_id)
            end(redis_client, request_id)
            redis_client.zadd(DUE, {request_id: 0})
        finish = ResponseStore.finish

        async def failing(self: ResponseStore, claim: Claim, state: dict[str, Any]) -> Any:
            if claim.item == created[0]:
                raise ValueError(state["output"])
            return await finish(self, claim, state)

        monkeypatch.setattr(ResponseStore, "finish", failing)
        told: list[tuple[str, str, str]] = []
        assert await collector_of(app, told).collect() == 3
        assert {name for _, name, _ in told} == set(created[1:])
        assert f"id={created[0]}" in caplog.text
        assert "four" not in caplog.text
        assert redis_client.zrange(DUE, 0, -1) == [created[0].encode()]
        seconds, microseconds = redis_client.time()
        assert redis_client.zscore(DUE, created[0]) > (seconds + 100) * 1000 + microseconds / 1000


@pytest.mark.usefixtures("idle_replicas")
async def test_a_stored_end_is_announced_even_if_its_stream_has_expired(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    async with gateway_of(redis_server, redis_client) as (app, http):
        created = (await http.post(PATH, json=BODY, headers={"Idempotency-Key": "k"})).json()["id"]
        await asyncio.to_thread(take, redis_client)
        begin(redis_client, created)
        end(redis_client, created)
        claims = Claims(app.state.gateway.redis, "responses", seconds=0.001)
        redis_client.zadd(DUE, {created: 0})
        (of_the_dead,) = await claims.take(9)  # its replica stores the end, and dies before it announces it
        completed = {"status": "completed", "output": [], "usage": None}
        assert await app.state.gateway.responses.finish(of_the_dead, completed) == "completed"
        redis_client.delete(stream_key(created))
        told: list[tuple[str, str, str]] = []
        while not await collector_of(app, told).collect():
            await asyncio.sleep(0.01)
        assert told == [("response.completed", created, "anyone")]
        assert redis_client.zcard(DUE) == 0
        again = await http.post(PATH, json=BODY, headers={"Idempotency-Key": "k"})
        assert again.json()["id"] == created
        assert redis_client.zscore(DUE, created) is None


@pytest.mark.usefixtures("idle_replicas")
async def test_a_response_whose_request_is_not_queued_yet_does_not_count_as_deleted(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_of(redis_server, redis_client) as (app, http):
        put = EnvelopeStore.put

        async def collecting(self: EnvelopeStore, envelope: Envelope) -> None:
            for claim in redis_client.zrange(DUE, 0, -1):
                redis_client.zadd(DUE, {claim: 0})
            await collector_of(app).collect()
            await put(self, envelope)

        monkeypatch.setattr(EnvelopeStore, "put", collecting)
        assert (await http.post(PATH, json=BODY)).status_code == 200
        assert redis_client.zcard(DUE) == 1


@pytest.mark.parametrize("has_mark", [True, False])
@pytest.mark.parametrize("background", [True, False])
async def test_a_repeat_after_the_end_of_the_stream_gets_the_stored_response(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", background: bool, has_mark: bool
) -> None:
    async with gateway_of(redis_server, redis_client) as (_, http):
        body, headers = {**BODY, "background": background}, {"Idempotency-Key": "k"}
        sending = asyncio.create_task(http.post(PATH, json=body, headers=headers))
        created = await asyncio.to_thread(take, redis_client)
        begin(redis_client, created)
        end(redis_client, created)
        await sending
        await wait_stored(redis_client, created)
        redis_client.delete(stream_key(created), *([] if has_mark else [ended_key(created)]))
        repeat = await http.post(PATH, json=body, headers=headers)
        assert repeat.json() == (await http.get(f"{PATH}/{created}")).json()
        assert (repeat.json()["id"], repeat.json()["status"]) == (created, "completed")
        streamed = await http.post(PATH, json={**body, "stream": True}, headers=headers)
        for refused in (streamed, await http.get(f"{PATH}/{created}?stream=true")):
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "stream_expired")


async def test_a_repeat_does_not_recreate_a_deleted_response(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    async with gateway_of(redis_server, redis_client) as (_, http):
        headers = {"Idempotency-Key": "k"}
        created = (await http.post(PATH, json=BODY, headers=headers)).json()["id"]
        assert (await http.delete(f"{PATH}/{created}")).status_code == 200
        assert (await http.post(PATH, json=BODY, headers=headers)).status_code == 404
        assert redis_client.keys("headrace:gw:re[qs]*") == []


async def test_an_interrupted_deletion_can_be_repeated(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_of(redis_server, redis_client) as (app, http):
        created = (await http.post(PATH, json=BODY)).json()["id"]

        async def cut(*_: Any) -> Any:
            raise OSError

        with monkeypatch.context() as patch:
            patch.setattr(app.state.gateway.client, "cancel", cut)
            assert (await http.delete(f"{PATH}/{created}")).status_code == 503
        assert (await http.delete(f"{PATH}/{created}")).status_code == 200
        assert redis_client.exists(ended_key(created))  # a worker will not run it
        assert redis_client.keys("headrace:gw:re[qs]*") == []


@pytest.mark.usefixtures("idle_replicas")
async def test_responses_without_a_worker_are_released_together(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_of(redis_server, redis_client) as (app, http):
        created = [(await http.post(PATH, json=BODY)).json()["id"] for _ in range(3)]
        looked: list[str] = []
        find = EnvelopeStore.find

        async def noted(self: EnvelopeStore, answer_id: str) -> Any:
            looked.append(answer_id)
            return await find(self, answer_id)

        monkeypatch.setattr(EnvelopeStore, "find", noted)
        for name in created:
            redis_client.zadd(DUE, {name: 0})
        assert await collector_of(app).collect() == 3
        assert looked == []
        redis_client.zadd(DUE, {created[0]: 0, created[1]: 0})
        redis_client.expire(f"headrace:gw:req:{created[0]}", 4100)  # its request expired more than a minute ago
        redis_client.delete(f"headrace:gw:req:{created[1]}")
        assert await collector_of(app).collect() == 2
        assert set(looked) == set(created[:2])
        assert redis_client.zscore(DUE, created[1]) is None


async def test_the_collector_does_not_count_as_a_subscriber(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    async with gateway_of(redis_server, redis_client) as (app, http):
        sending = asyncio.create_task(http.post(PATH, json={**BODY, "background": False}))
        request_id = await asyncio.to_thread(take, redis_client)
        begin(redis_client, request_id)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        redis_client.expire(listener_key(request_id), 1000)
        claims = app.state.gateway.responses._claims
        redis_client.zadd(claims.due_key, {request_id: 0})
        while redis_client.zscore(claims.due_key, request_id) == 0:
            await asyncio.sleep(0.02)
        assert redis_client.ttl(listener_key(request_id)) <= 1000
        assert (await http.get(f"{PATH}/{request_id}")).json()["status"] == "in_progress"
        assert redis_client.ttl(listener_key(request_id)) > 1000  # a poll is a heartbeat


@pytest.mark.usefixtures("idle_replicas")
async def test_thousands_of_open_responses_are_checked_and_stored(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    async with gateway_of(redis_server, redis_client) as (app, http):
        created = (await http.post(PATH, json=BODY)).json()["id"]
        packed = redis_client.get(f"headrace:gw:req:{created}")
        names = [f"resp_{number:032x}" for number in range(3000)]
        with redis_client.pipeline() as pipe:
            for name in names:
                pipe.set(f"headrace:gw:req:{name}", packed.replace(created.encode(), name.encode()))
                pipe.hset(response_key(name), "input", "[]")
                pipe.zadd(DUE, {name: 0})
            pipe.execute()
        for name in names[:40]:
            begin(redis_client, name)
            end(redis_client, name)
        collectors = [collector_of(app) for _ in range(3)]
        for name in names[:40]:
            while not redis_client.hexists(response_key(name), "state"):
                await asyncio.gather(*(each.collect() for each in collectors))
        assert redis_client.zcard(DUE) == 3000 - 40 + 1


@pytest.mark.parametrize("has_stream", [True, False])
async def test_a_response_that_no_worker_took_or_whose_stream_is_lost_has_failed(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", has_stream: bool
) -> None:
    async with gateway_of(redis_server, redis_client) as (app, http):
        created = (await http.post(PATH, json=BODY, headers={"X-Headrace-Expires": "1"})).json()["id"]
        key = f"headrace:gw:req:{created}"
        envelope = await app.state.gateway.envelopes.find(created)
        if has_stream:
            redis_client.set(ended_key(created), 1)
        else:
            old = envelope.created - 100
            packed = redis_client.get(key)
            redis_client.set(key, packed.replace(envelope.created.to_bytes(4), old.to_bytes(4)))
        state = await wait_stored(redis_client, created)
        assert state["status"] == "failed"
        assert ("not_stored_in_time" if has_stream else "expired") in state["error"]["message"]


async def test_only_the_owning_key_and_tenant_can_read_a_response(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys", "mine", "other")
    mine, other = bearer(keys["mine"]), bearer(keys["other"])
    async with gateway_of(redis_server, redis_client, keys=tmp_path / "keys") as (_, http):
        created = (await http.post(PATH, json=BODY, headers=mine)).json()["id"]
        path = f"{PATH}/{created}"
        calls = [("GET", path), ("GET", f"{path}?stream=true"), ("GET", f"{path}/input_items")]
        calls += [("POST", f"{path}/cancel"), ("DELETE", path)]
        for method, url in calls:
            assert (await http.request(method, url, headers=other)).status_code == 404, (method, url)
        body = {**BODY, "previous_response_id": created}
        foreign = await http.post(PATH, json=body, headers=other)
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (400, "previous_response_not_found")
        running = await http.post(PATH, json=body, headers=mine)
        assert (running.status_code, running.json()["error"]["code"]) == (400, "previous_response_not_finished")
        renamed = (tmp_path / "keys").read_text().replace('name = "mine"', 'name = "mine"\ntenant = "acme"')
        (tmp_path / "keys").write_text(renamed)
        while (await http.get(path, headers=mine)).status_code != 404:
            await asyncio.sleep(0.05)


async def test_a_response_with_store_false_is_kept_as_long_as_its_stream(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    async with gateway_of(redis_server, redis_client) as (_, http):
        created = (await http.post(PATH, json={**BODY, "store": False})).json()["id"]
        request_id = await asyncio.to_thread(take, redis_client)
        begin(redis_client, request_id)
        end(redis_client, request_id)
        assert (await http.get(f"{PATH}/{created}")).json()["status"] == "completed"
        await wait_until_nothing_is_due(redis_client)
        assert not redis_client.exists(response_key(created))
        assert (await http.get(f"{PATH}/{created}/input_items")).status_code == 404
        assert 0 < redis_client.ttl(f"headrace:gw:req:{created}") <= 600
        redis_client.delete(stream_key(created))
        assert (await http.get(f"{PATH}/{created}")).status_code == 404
        assert (await http.post(f"{PATH}/{created}/cancel", json={})).status_code == 404
        assert not redis_client.exists(stream_key(created))


async def test_too_large_a_response_is_not_stored(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_of(redis_server, redis_client) as (_, http):
        monkeypatch.setattr("headrace_gateway.answers.response_store.MAX_STORED_BYTES", 1000)
        body = {**BODY, "input": "x" * 9000}
        refused = await http.post(PATH, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "response_too_large")
        assert redis_client.keys("headrace:gw:response:*") == []
        assert redis_client.keys("headrace:gw:stored:*") == []  # it does not count against its tenant
        assert (await http.post(PATH, json={**body, "store": False})).status_code == 200
        redis_client.flushdb()
        register_model(redis_client, "tiny", max_model_len=999, worker="w", seen=5.0)
        created = (await http.post(PATH, json=BODY)).json()["id"]
        monkeypatch.setattr("headrace_gateway.answers.response_store.MAX_STORED_BYTES", 100)
        await asyncio.to_thread(take, redis_client)
        begin(redis_client, created)
        end(redis_client, created)
        await wait_stored(redis_client, created)
        refused = await http.get(f"{PATH}/{created}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "response_too_large")
        assert "response.completed" in (await http.get(f"{PATH}/{created}?stream=true")).text


async def test_input_items_are_paginated(redis_server: EmbeddedServer, redis_client: "redis.Redis") -> None:
    items = [{"role": "user", "content": str(number), "id": f"msg_{number}"} for number in range(5)]
    async with gateway_of(redis_server, redis_client) as (_, http):
        created = (await http.post(PATH, json={**BODY, "input": items})).json()["id"]
        path = f"{PATH}/{created}/input_items"
        page = (await http.get(f"{path}?limit=2")).json()
        assert [item["id"] for item in page["data"]] == ["msg_4", "msg_3"]
        assert (page["first_id"], page["last_id"], page["has_more"]) == ("msg_4", "msg_3", True)
        rest = (await http.get(f"{path}?order=asc&after=msg_2")).json()
        assert [item["id"] for item in rest["data"]] == ["msg_3", "msg_4"]
        assert rest["has_more"] is False
        for query in ("limit=0", "limit=101", "limit=x", "limit=0000000010000", "order=up", "after=unknown"):
            assert (await http.get(f"{path}?{query}")).status_code == 400
        for query in (
            "stream=maybe",
            "starting_after=1",
            "stream=true&starting_after=-1",
            "stream=true&starting_after=x",
        ):
            assert (await http.get(f"{PATH}/{created}?{query}")).status_code == 400


async def test_items_can_be_referred_to_by_id(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys", "mine", "other")
    mine, other = bearer(keys["mine"]), bearer(keys["other"])
    async with gateway_of(redis_server, redis_client, keys=tmp_path / "keys") as (_, http):
        created = (await http.post(PATH, json=BODY, headers=mine)).json()["id"]
        await asyncio.to_thread(take, redis_client)
        begin(redis_client, created)
        end(redis_client, created)
        (said,) = (await http.get(f"{PATH}/{created}", headers=mine)).json()["output"]
        (asked,) = (await http.get(f"{PATH}/{created}/input_items", headers=mine)).json()["data"]
        names = [{"type": "item_reference", "id": item["id"]} for item in (asked, said)]
        body = {**BODY, "input": [*names, {"role": "user", "content": "more"}]}
        again = await http.post(PATH, json=body, headers=mine)
        assert again.status_code == 200
        path = f"{PATH}/{again.json()['id']}/input_items?order=asc"
        items = (await http.get(path, headers=mine)).json()["data"]
        assert [item["content"][0]["text"] for item in items] == ["a", "four", "more"]
        assert items[:2] == [asked, said]
        for headers, name in ((other, names[0]), (mine, {"type": "item_reference", "id": "msg_1"})):
            refused = await http.post(PATH, json={**BODY, "input": [name]}, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "item_not_found")


@pytest.mark.parametrize(
    ("most", "what"), [(1000, "the items that input refers to"), (150, "the responses whose items")]
)
async def test_the_size_of_referenced_items_is_limited_even_if_one_is_repeated(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch, most: int, what: str
) -> None:
    monkeypatch.setattr("headrace_gateway.responses.chain.MAX_BYTES", most)
    async with gateway_of(redis_server, redis_client) as (_, http):
        created = (await http.post(PATH, json=BODY)).json()["id"]
        await asyncio.to_thread(take, redis_client)
        begin(redis_client, created)
        end(redis_client, created)
        (asked,) = (await http.get(f"{PATH}/{created}/input_items")).json()["data"]
        body = {**BODY, "input": [{"type": "item_reference", "id": asked["id"]}] * 50}
        refused = (await http.post(PATH, json=body)).json()["error"]
        assert refused["message"].startswith(f"{what}"), refused
        assert f"at most {most} bytes" in refused["message"]


async def test_a_request_beyond_the_keys_rate_reads_no_stored_items(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = write_keys(tmp_path / "keys", "mine", requests_per_minute="1")
    mine = bearer(keys["mine"])
    async with gateway_of(redis_server, redis_client, keys=tmp_path / "keys") as (_, http):
        created = (await http.post(PATH, json=BODY, headers=mine)).json()["id"]

        async def read(*_: Any) -> Any:
            raise AssertionError("items were read")

        monkeypatch.setattr("headrace_gateway.responses.endpoints.read_history", read)
        refused = await http.post(PATH, json={**BODY, "previous_response_id": created}, headers=mine)
        assert refused.status_code == 429


async def test_the_length_of_a_chain_is_limited(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_gateway.responses.chain.MAX_LINKS", 2)
    async with gateway_of(redis_server, redis_client) as (_, http):
        previous = None
        for _ in range(3):
            body = {**BODY, "previous_response_id": previous}
            previous = (await http.post(PATH, json=body)).json()["id"]
            assert await asyncio.to_thread(take, redis_client) == previous
            begin(redis_client, previous)
            end(redis_client, previous)
        refused = await http.post(PATH, json={**BODY, "previous_response_id": previous})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
        assert "at most 2 responses" in refused.json()["error"]["message"]


async def test_a_repeat_with_its_idempotency_key_is_the_same_response(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    async with gateway_of(redis_server, redis_client) as (_, http):
        answers = [await http.post(PATH, json=BODY, headers={"Idempotency-Key": "k"}) for _ in range(2)]
        assert answers[0].json() == answers[1].json()
        assert len(redis_client.keys("headrace:gw:response:*")) == 1
        other = await http.post(PATH, json={**BODY, "input": "b"}, headers={"Idempotency-Key": "k"})
        assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
