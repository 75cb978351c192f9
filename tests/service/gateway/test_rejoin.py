"""Streams that break and go on: at another replica, with another worker, and after a repeat of the request."""

import asyncio
import http.client
import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import redis

from headrace_broker import QueueFullError
from headrace_broker.embedded import EmbeddedServer
from headrace_broker.registry import register_model
from service.gateway.conftest import RunningGateway
from service.gateway.gateway_process import PATIENCE, GatewayProcess
from service.gateway.in_process import running_app
from service.gateway.test_gateway_command import begin, end, take

BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True}
BODY |= {"max_tokens": 300, "temperature": 1, "seed": 3, "ignore_eos": True, "stream_options": {"include_usage": True}}
CHATS = "/v1/chat/completions"
RESUME = {"X-Headrace-Resume": "1", "Content-Type": "application/json"}


def events(
    replica: GatewayProcess, method: str, path: str, headers: dict[str, str], body: Any = None
) -> Iterator[bytes]:
    """The events of a stream, as they come."""
    with closing(http.client.HTTPConnection("127.0.0.1", replica.port, timeout=PATIENCE)) as connection:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        event = b""
        while line := response.readline():
            event += line
            if line == b"\n":
                if not event.startswith(b"event: ping"):
                    yield event
                event = b""


def take_some(stream: Iterator[bytes], count: int) -> tuple[list[bytes], str, str]:
    """The next events, the id of the answer, and the id of the last of these events."""
    taken = [next(stream) for _ in range(count)]
    cursor, data = taken[-1].decode().splitlines()[:2]
    return taken, json.loads(data.removeprefix("data: "))["id"], cursor.removeprefix("id: ")


def rejoin(replica: GatewayProcess, answer_id: str, cursor: str | None) -> list[bytes]:
    headers = {"Accept": "text/event-stream"} | ({} if cursor is None else {"Last-Event-ID": cursor})
    return list(events(replica, "GET", f"{CHATS}/{answer_id}?stream=true", headers))


def assert_whole(stream: list[bytes], replica: GatewayProcess, answer_id: str) -> None:
    assert stream == rejoin(replica, answer_id, None)
    assert stream[-1] == b"data: [DONE]\n\n"
    usage = json.loads(stream[-2].split(b"data: ", 1)[1])["usage"]
    assert usage["completion_tokens"] == 300


def test_a_stream_goes_on_at_another_replica_when_its_own_is_killed(gateway: RunningGateway) -> None:
    first, second = gateway.replicas
    stream = events(first, "POST", CHATS, RESUME, BODY)
    before, answer_id, cursor = take_some(stream, 20)
    first.kill()
    try:
        assert_whole(before + rejoin(second, answer_id, cursor), second, answer_id)
    finally:
        first.start()
        first.wait_ready()


def test_a_stream_goes_on_with_another_worker_when_its_own_is_killed(gateway: RunningGateway) -> None:
    replica = gateway.replicas[0]
    stream = events(replica, "POST", CHATS, RESUME, BODY)
    before, answer_id, _ = take_some(stream, 20)
    gateway.service.workers[-1].kill()
    gateway.service.start_worker().wait_ready()
    assert_whole(before + list(stream), gateway.replicas[1], answer_id)
    assert len(gateway.service.stream(answer_id).attempts) == 2


def test_a_stream_goes_on_when_redis_has_been_away(gateway: RunningGateway) -> None:
    stream = events(gateway.replicas[0], "POST", CHATS, RESUME, BODY)
    before, answer_id, _ = take_some(stream, 20)
    pid = gateway.service.client.info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        gateway.replicas[1].get("/health")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert_whole(before + list(stream), gateway.replicas[1], answer_id)


async def test_a_repeat_of_a_request_that_a_full_queue_refused_is_answered(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    register_model(redis_client, "tiny", max_model_len=999, worker="w", seen=5.0)
    headers = {"Idempotency-Key": "k"}
    body = {"model": "tiny", "prompt": "a", "max_tokens": 9}

    def refuse(_submissions: object) -> None:
        raise QueueFullError("tiny", 1, 1, None)

    async with running_app(redis_server.url) as (app, client):
        with monkeypatch.context() as full:
            full.setattr(app.state.gateway.client._client, "_require_room", refuse)
            assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 429
        repeating = asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))
        request_id = await asyncio.to_thread(take, redis_client)
        begin(redis_client, request_id)
        end(redis_client, request_id)
        answers = [await repeating, await client.post("/v1/completions", json=body, headers=headers)]
        answers.append(await client.get(f"/v1/completions/{request_id}"))
        assert [answer.status_code for answer in answers] == [200] * 3
        assert {answer.json()["id"] for answer in answers} == {request_id}
        other = await client.post("/v1/completions", json={**body, "prompt": "b"}, headers=headers)
        assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
