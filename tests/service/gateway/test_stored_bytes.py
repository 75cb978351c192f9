"""What one tenant may keep in Redis, and what happens when Redis is almost full."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis

from headrace_broker.models.registry import register_model
from headrace_broker.results import ErrorInfo, Usage
from headrace_broker.server.connections import connect_async
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.streams.writer import StreamWrite, StreamWriter
from headrace_gateway.errors import ApiError
from headrace_gateway.keys.limits import StoredBytes
from service.gateway.in_process import bearer, running_app, write_keys
from service.gateway.test_gateway_command import begin, end, take

pytestmark = pytest.mark.rotated("gateway/headrace_gateway/responses", "gateway/headrace_gateway/redis")

MIB = 2**20
BOUND = 8 * MIB


@pytest.fixture
async def stored(redis_server: EmbeddedServer) -> AsyncIterator[StoredBytes]:
    async with connect_async(redis_server.url) as client:
        yield StoredBytes(client, 1 * MIB)


async def admits(
    stored: StoredBytes, item: str, num_bytes: int, *, key: str = "web", tenant: str | None = None
) -> bool:
    try:
        await stored.admit(key, tenant, item, num_bytes, 600)
    except ApiError as error:
        return error.status != 429
    return True


async def test_a_tenant_is_bounded_and_gets_its_room_back(stored: StoredBytes, redis_client: "redis.Redis") -> None:
    assert await admits(stored, "a", MIB - 5000)
    assert not await admits(stored, "b", 6000)
    assert await admits(stored, "b", 6000, key="another")
    assert await admits(stored, "b", 6000, tenant="acme")
    assert not await admits(stored, "c", MIB, tenant="acme", key="third")  # the keys of a tenant share its room
    await stored.change("web", None, "a", 5000, 600)
    assert await admits(stored, "b", 6000)
    await stored.change("web", None, "a", 0, 600)
    await stored.change("web", None, "b", 9, 600)  # so little is not counted
    assert redis_client.keys("headrace:gw:stored:key:web*") == []


async def test_repeats_are_counted_once_and_expired_requests_not_at_all(
    stored: StoredBytes, redis_client: "redis.Redis"
) -> None:
    for _ in range(3):
        assert await admits(stored, "a", MIB - 5000)
    redis_client.zadd("headrace:gw:stored:key:web", {"a": 5})  # its time has passed
    assert await admits(stored, "b", MIB)
    assert redis_client.zrange("headrace:gw:stored:key:web", 0, -1) == [b"b"]
    assert 0 < redis_client.ttl("headrace:gw:stored:key:web:bytes") <= 600


async def test_a_small_redis_lowers_the_bound(redis_server: EmbeddedServer, redis_client: "redis.Redis") -> None:
    most = redis_client.info("memory")["used_memory"] + 64 * MIB
    redis_client.config_set("maxmemory", most)
    try:
        async with connect_async(redis_server.url) as client:
            stored = StoredBytes(client, 10**12)
            assert not await admits(stored, "a", most // 4 + 1)
            assert await admits(stored, "a", most // 4)
    finally:
        redis_client.config_set("maxmemory", 0)


def response(size: int, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": "x" * size, "background": True, **more}


def refuse(client: "redis.Redis", request_id: str) -> None:
    """Plays a worker that finds the prompt too long."""
    writer = StreamWriter(client, 600)
    attempt = writer.claim(request_id, "w").attempt
    failed = ErrorInfo("context_length_exceeded", "too long")
    writer.publish([StreamWrite.end(request_id, attempt, 0, finish_reason="error", usage=Usage(0, 0, 0), error=failed)])


async def test_stored_responses_of_one_key_are_refused_at_its_bound_and_others_are_not(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    register_model(redis_client, "tiny", max_model_len=99_999, worker="w", seen=5.0)
    keys = write_keys(tmp_path / "keys", "greedy", "other")
    async with running_app(redis_server.url, keys=tmp_path / "keys", max_stored_bytes=BOUND) as (_, http):

        async def post(key: str) -> Any:
            return await http.post("/v1/responses", json=response(3_500_000), headers=bearer(keys[key]))

        first = await post("greedy")
        assert first.status_code == 200
        refused = await post("greedy")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "stored_bytes_exceeded")
        assert "retry-after" in refused.headers
        assert (await post("other")).status_code == 200
        path = f"/v1/responses/{first.json()['id']}"
        assert (await http.delete(path, headers=bearer(keys["greedy"]))).status_code == 200
        assert (await post("greedy")).status_code == 200


async def test_the_input_of_a_response_that_cannot_run_is_not_kept(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    register_model(redis_client, "tiny", max_model_len=99_999, worker="w", seen=5.0)
    async with running_app(redis_server.url, max_stored_bytes=BOUND) as (_, http):
        for _ in range(3):  # three would not fit
            created = await http.post("/v1/responses", json=response(3_500_000))
            assert created.status_code == 200, created.text
            request_id = await asyncio.to_thread(take, redis_client)
            refuse(redis_client, request_id)
            while redis_client.hexists(f"headrace:gw:response:{request_id}", "input"):
                await asyncio.sleep(0.02)
            while redis_client.zcard("headrace:gw:stored:key:anyone"):
                await asyncio.sleep(0.02)
            assert (await http.get(f"/v1/responses/{request_id}")).json()["status"] == "failed"


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/responses", {"input": "x" * MIB}),
        ("/v1/completions", {"prompt": "x" * MIB}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x" * MIB}], "max_tokens": 1}),
    ],
)
async def test_a_request_far_larger_than_the_context_is_not_stored(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", path: str, prompt: dict[str, Any]
) -> None:
    register_model(redis_client, "tiny", max_model_len=999, worker="w", seen=5.0)
    async with running_app(redis_server.url) as (_, http):
        refused = await http.post(path, json={"model": "tiny", **prompt})
        assert refused.status_code == 400
        assert "must have at most 326080 bytes, got 10" in refused.json()["error"]["message"]
    assert not redis_client.keys("headrace:gw:stored:*")
    assert not redis_client.llen("headrace.tiny")


async def test_a_chat_is_counted_until_its_answer_has_ended(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    register_model(redis_client, "tiny", max_model_len=99_999, worker="w", seen=5.0)
    body = {"model": "tiny", "prompt": "x" * MIB}
    async with running_app(redis_server.url, max_stored_bytes=BOUND) as (_, http):
        waiting = asyncio.create_task(http.post("/v1/completions", json=body))
        request_id = await asyncio.to_thread(take, redis_client)
        assert int(redis_client.hget("headrace:gw:stored:key:anyone:bytes", "") or 0) > MIB
        begin(redis_client, request_id)
        end(redis_client, request_id)
        assert (await waiting).status_code == 200
        assert redis_client.zcard("headrace:gw:stored:key:anyone") == 0


async def test_a_cancelled_chat_that_nobody_reads_is_not_counted(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    register_model(redis_client, "tiny", max_model_len=99_999, worker="w", seen=5.0)
    body = {"model": "tiny", "prompt": ["x" * MIB, "y"]}
    async with running_app(redis_server.url, max_stored_bytes=BOUND) as (_, http):
        waiting = asyncio.create_task(http.post("/v1/completions", json=body))
        request_id = (await asyncio.to_thread(take, redis_client)).removesuffix(".1")
        waiting.cancel()
        await asyncio.wait([waiting])
        assert redis_client.zcard("headrace:gw:stored:key:anyone") == 1
        cancelled = await http.post(f"/headrace/requests/{request_id}/cancel", json={})
        assert cancelled.json()["cancelled"] is True
        assert redis_client.zcard("headrace:gw:stored:key:anyone") == 0


@pytest.mark.parametrize(
    ("num_tokens", "text", "is_counted"), [(99, "x" * 99_999, False), (100, "short", False), (100, "x" * 99_999, True)]
)
async def test_the_large_stream_of_an_answer_is_counted_after_it_was_read(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", num_tokens: int, text: str, is_counted: bool
) -> None:
    register_model(redis_client, "tiny", max_model_len=999, worker="w", seen=5.0)
    async with running_app(redis_server.url) as (_, http):
        waiting = asyncio.create_task(http.post("/v1/completions", json={"model": "tiny", "prompt": "x"}))
        request_id = await asyncio.to_thread(take, redis_client)
        writer = StreamWriter(redis_client, 600)
        writer.claim(request_id, "w")
        ids = list(range(num_tokens))
        ended = StreamWrite.end(request_id, 1, num_tokens, finish_reason="stop", usage=Usage(1, 0, num_tokens))
        writer.publish([StreamWrite.chunk(request_id, 1, num_tokens, index=0, token_ids=ids, text=text), ended])
        assert (await waiting).status_code == 200
    counted = redis_client.hget("headrace:gw:stored:key:anyone:bytes", f"{request_id}:stream")
    assert (int(counted or 0) > 99_999) == is_counted
    assert not is_counted or 590 < redis_client.ttl("headrace:gw:stored:key:anyone") <= 600


async def test_a_replica_is_not_ready_before_redis_is_full(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    register_model(redis_client, "tiny", max_model_len=99_999, worker="w", seen=5.0)
    async with running_app(redis_server.url) as (_, http):
        assert (await http.get("/ready")).status_code == 200
        try:
            while (found := await http.get("/ready")).status_code == 200:
                redis_client.config_set("maxmemory", redis_client.info("memory")["used_memory"])
                await asyncio.sleep(0.05)
            assert "Redis is almost full" in found.json()["reason"]
        finally:
            redis_client.config_set("maxmemory", 0)
        while (await http.get("/ready")).status_code != 200:
            await asyncio.sleep(0.05)
