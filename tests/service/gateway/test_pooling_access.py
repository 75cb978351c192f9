"""What a call of a pooling API takes of its key's limits, and what a client that disconnects leaves, on a real server.

The test is the worker.
"""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import redis

from headrace_broker import Client
from headrace_broker.keys import result_key, stream_key
from headrace_broker.models.registry import register_model
from headrace_broker.results import Usage
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.streams.writer import StreamWrite, StreamWriter
from service.gateway.gateway_process import PATIENCE, GatewayProcess
from service.gateway.in_process import bearer, running_app, write_keys
from service.gateway.test_gateway_command import sent, take

MIB = 2**20
BODY: dict[str, Any] = {"model": "tiny", "input": "mill"}
TASKS = ("embed", "score", "classify")
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", BODY),
    ("/v2/embed", {"model": "tiny", "texts": ["mill"], "embedding_types": ["float"]}),
    ("/v1/rerank", {"model": "tiny", "query": "mill", "documents": ["river"]}),
    ("/v1/score", {"model": "tiny", "text_1": "mill", "text_2": "river"}),
    ("/v1/classify", BODY),
    ("/embed", {"inputs": "mill"}),
    ("/predict", {"inputs": "mill"}),
]


@pytest.fixture(autouse=True)
def model(redis_client: redis.Redis) -> None:
    register_model(redis_client, "tiny", max_model_len=99, worker="w", seen=5.0, tasks=TASKS, max_input_tokens=99)


def begin(client: redis.Redis, request_id: str, tokens: int) -> int:
    return StreamWriter(client, 600).claim(request_id, "w", prompt_tokens=tokens).attempt


def end(client: redis.Redis, request_id: str, tokens: int = 7, *, rows: int = 1, width: int = 1) -> None:
    """Answer with rows of zeros, and store the result as a worker does: after the end of the stream."""
    attempt = begin(client, request_id, tokens)
    data = struct.pack(f"<{rows * width}f", *[0.0] * (rows * width))
    ended = StreamWrite.end(
        request_id, attempt, rows, finish_reason="stop", usage=Usage(tokens, 0, 0), labels=["a"] * width, truncated=[]
    )
    StreamWriter(client, 600).publish([StreamWrite.rows(request_id, attempt, 0, rows, data), ended])
    client.set(result_key(request_id), data, ex=600)


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_a_call_takes_one_request_and_its_tokens_from_the_limits_of_its_key(
    redis_server: EmbeddedServer, redis_client: redis.Redis, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    keys = write_keys(tmp_path / "keys", "web", requests_per_minute="2", tokens_per_minute="40")
    async with running_app(redis_server.url, keys=tmp_path / "keys") as (_, http):
        asked = asyncio.create_task(http.post(path, json=body, headers=bearer(keys["web"])))
        request_id = await asyncio.to_thread(take, redis_client)
        end(redis_client, request_id, 300)
        answer = await asked
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ratelimit-remaining-requests"] == "1"
        refused = await http.post(path, json=body, headers=bearer(keys["web"]))
        assert refused.status_code == 429
        assert "the key web has used its 40 tokens of this minute" in refused.text
        assert int(refused.headers["retry-after"]) > 60
    assert redis_client.get(f"headrace:gw:charged:{request_id}") == b"300"


async def test_calls_above_the_requests_of_a_key_are_refused(
    redis_server: EmbeddedServer, redis_client: redis.Redis, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys", "web", requests_per_minute="1")
    async with running_app(redis_server.url, keys=tmp_path / "keys") as (_, http):
        invalid = await http.post("/v1/embeddings", json={**BODY, "input": ""}, headers=bearer(keys["web"]))
        assert invalid.status_code == 400
        refused = await http.post("/v1/embeddings", json=BODY, headers=bearer(keys["web"]))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert not redis_client.exists("headrace.tiny")


@pytest.fixture
def gateway(redis_server: EmbeddedServer, tmp_path: Path) -> Iterator[tuple[GatewayProcess, dict[str, str]]]:
    keys = write_keys(tmp_path / "keys", "web", tokens_per_minute="1000")
    replica = GatewayProcess(redis_url=redis_server.url, log=tmp_path / "log", keys=tmp_path / "keys").wait_ready()
    yield replica, {"Content-Type": "application/json", **bearer(keys["web"])}
    replica.close()


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


def test_a_client_that_disconnects_cancels_its_messages(
    gateway: tuple[GatewayProcess, dict[str, str]], redis_server: EmbeddedServer, redis_client: redis.Redis
) -> None:
    replica, headers = gateway
    with Client(redis_server.url) as client:
        with sent(replica, "POST", "/v1/embeddings", headers, {**BODY, "input": ["mill"] * 600}):
            request_ids = [take(redis_client) for _ in range(3)]
            begin(redis_client, request_ids[0], 256)
        wait_for(lambda: {client.status(each).finish_reason for each in request_ids} == {"cancelled"})


async def test_a_call_is_charged_for_the_messages_that_were_begun(
    redis_server: EmbeddedServer, redis_client: redis.Redis, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys", "web", tokens_per_minute="1000")
    body = {**BODY, "input": ["mill"] * 600}
    async with running_app(redis_server.url, keys=tmp_path / "keys") as (app, http):
        asked = asyncio.create_task(http.post("/v1/embeddings", json=body, headers=bearer(keys["web"])))
        taken = [await asyncio.to_thread(take, redis_client) for _ in range(3)]
        begin(redis_client, taken[0], 256)
        begin(redis_client, taken[1], 250)
        async with asyncio.timeout(PATIENCE):
            while redis_client.get(f"headrace:gw:charged:{taken[0]}") != b"506":
                await app.state.gateway.limits.aclose()  # charges what is read so far
                await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.wait([asked])


def test_a_disconnected_client_with_an_idempotency_key_gets_its_answer_later(
    gateway: tuple[GatewayProcess, dict[str, str]], redis_server: EmbeddedServer, redis_client: redis.Redis
) -> None:
    replica, headers = gateway
    headers["Idempotency-Key"] = "k"
    body = {**BODY, "input": ["mill"] * 300}
    with sent(replica, "POST", "/v1/embeddings", headers, body):
        request_ids = [take(redis_client), take(redis_client)]
    wait_for(lambda: '"status": 499' in replica.log_text() or '"status":499' in replica.log_text())
    with Client(redis_server.url) as client:
        assert {client.status(each).state for each in request_ids} == {"pending"}
    with sent(replica, "POST", "/v1/embeddings", headers, body) as again:
        for request_id, rows in zip(request_ids, (256, 44), strict=True):
            end(redis_client, request_id, 100, rows=rows)
        answer = again.getresponse()
        assert (answer.status, len(json.loads(answer.read())["data"])) == (200, 300)
        assert answer.getheader("x-headrace-id") == request_ids[0]
    with sent(replica, "POST", "/v1/embeddings", headers, {**body, "input": ["wheel"] * 300}) as other:
        refused = other.getresponse()
        assert (refused.status, json.loads(refused.read())["error"]["code"]) == (422, "idempotency_key_reused")
    with sent(replica, "POST", "/v1/classify", headers, body):  # the keys of another API are others
        assert take(redis_client) not in request_ids


@pytest.fixture
async def http(redis_server: EmbeddedServer) -> AsyncIterator[httpx2.AsyncClient]:
    async with running_app(redis_server.url, max_stored_bytes=8 * MIB) as (_, client):
        yield client


LARGE = {**BODY, "input": ["x" * MIB] * 3}
COUNTED = "headrace:gw:stored:key:anyone:bytes"


async def test_the_bytes_of_a_call_are_counted_until_its_answer(
    http: httpx2.AsyncClient, redis_client: redis.Redis
) -> None:
    waiting = [asyncio.create_task(http.post("/v1/embeddings", json=LARGE)) for _ in range(2)]
    taken = [await asyncio.to_thread(take, redis_client) for _ in range(6)]  # an input each, as they are so long
    assert int(redis_client.hget(COUNTED, "") or 0) > 6 * MIB
    refused = await http.post("/v1/embeddings", json=LARGE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "stored_bytes_exceeded")
    for request_id in taken:
        end(redis_client, request_id)
    assert [(await each).status_code for each in waiting] == [200, 200]
    assert not redis_client.exists(COUNTED)


@pytest.mark.parametrize("has_key", [False, True])
async def test_the_bytes_of_a_disconnected_client_are_counted_while_its_messages_may_run(
    redis_server: EmbeddedServer, redis_client: redis.Redis, has_key: bool
) -> None:
    headers = {"Idempotency-Key": "k"} if has_key else {}
    async with running_app(redis_server.url) as (app, http):
        asked = asyncio.create_task(http.post("/v1/embeddings", json=LARGE, headers=headers))
        taken = [await asyncio.to_thread(take, redis_client) for _ in range(3)]
        await until(lambda: len(app.state.gateway.hub) == 3)  # it waits for the rows
        asked.cancel()
        await asyncio.wait([asked])
        assert bool(redis_client.exists(COUNTED)) == has_key
        if has_key:
            again = asyncio.create_task(http.post("/v1/embeddings", json=LARGE, headers=headers))
            for request_id in taken:
                end(redis_client, request_id)
            assert (await again).status_code == 200
            assert not redis_client.exists(COUNTED)


async def test_a_call_that_the_queue_refuses_is_not_counted(
    redis_server: EmbeddedServer, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_MAX_QUEUED_REQUESTS", "2")
    async with running_app(redis_server.url) as (_, http):
        refused = await http.post("/v1/embeddings", json=LARGE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert not redis_client.exists(COUNTED)
    assert not redis_client.exists("headrace.tiny")


@pytest.mark.parametrize("has_key", [False, True])
async def test_redis_keeps_the_rows_of_an_answer_only_if_they_can_be_read_again(
    http: httpx2.AsyncClient, redis_client: redis.Redis, has_key: bool
) -> None:
    headers = {"Idempotency-Key": "k"} if has_key else {}
    asked = asyncio.create_task(http.post("/v1/embeddings", json=BODY, headers=headers))
    request_id = await asyncio.to_thread(take, redis_client)
    end(redis_client, request_id, width=20_000)
    assert (await asked).status_code == 200
    names = stream_key(request_id), result_key(request_id)
    if has_key:
        assert int(redis_client.hget(COUNTED, f"{request_id}:stream") or 0) > 80_000
        assert all(redis_client.ttl(name) > 500 for name in names)
    else:
        await until(lambda: all(0 < redis_client.ttl(name) <= 30 for name in names))
        assert not redis_client.exists(COUNTED)
