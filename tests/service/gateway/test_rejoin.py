"""Streams that continue after a break: at another replica, with another worker, and after a repeated request."""

import asyncio
import http.client
import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from headrace_broker import QueueFullError
from headrace_broker.keys import ended_key, stream_key
from headrace_broker.models.registry import register_model
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.streams.listeners import Listeners
from headrace_gateway.redis.keys import envelope_key
from service.gateway.conftest import RunningGateway
from service.gateway.gateway_process import PATIENCE, GatewayProcess
from service.gateway.in_process import bearer, running_app, write_keys
from service.gateway.test_gateway_command import begin, end, take

pytestmark = pytest.mark.rotated(
    "gateway/headrace_gateway/answers",
    "gateway/headrace_gateway/http",
    "gateway/headrace_gateway/chat",
    "broker/headrace_broker/streams",
)

BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True}
BODY |= {"max_tokens": 300, "temperature": 1, "seed": 3, "ignore_eos": True, "stream_options": {"include_usage": True}}
LONG = 800
"""Tokens that no worker makes before it is killed."""
CHATS = "/v1/chat/completions"
RESUME = {"X-Headrace-Resume": "1", "Content-Type": "application/json"}


def events(
    replica: GatewayProcess, method: str, path: str, headers: dict[str, str], body: Any = None
) -> Iterator[bytes]:
    """Yield the events of a stream as they arrive."""
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
    """Return the next events, the id of the answer, and the id of the last of these events."""
    taken = [next(stream) for _ in range(count)]
    cursor, data = taken[-1].decode().splitlines()[:2]
    return taken, json.loads(data.removeprefix("data: "))["id"], cursor.removeprefix("id: ")


def rejoin(replica: GatewayProcess, answer_id: str, cursor: str | None) -> list[bytes]:
    headers = {"Accept": "text/event-stream"} | ({} if cursor is None else {"Last-Event-ID": cursor})
    return list(events(replica, "GET", f"{CHATS}/{answer_id}?stream=true", headers))


def assert_whole(stream: list[bytes], replica: GatewayProcess, answer_id: str, num_tokens: int = 300) -> None:
    assert stream == rejoin(replica, answer_id, None)
    assert stream[-1] == b"data: [DONE]\n\n"
    usage = json.loads(stream[-2].split(b"data: ", 1)[1])["usage"]
    assert usage["completion_tokens"] == num_tokens


def test_a_stream_continues_at_another_replica_when_its_own_is_killed(gateway: RunningGateway) -> None:
    first, second = gateway.replicas
    stream = events(first, "POST", CHATS, RESUME, BODY)
    before, answer_id, cursor = take_some(stream, 20)
    first.kill()
    try:
        assert_whole(before + rejoin(second, answer_id, cursor), second, answer_id)
    finally:
        first.start()
        first.wait_ready()


def test_a_stream_continues_with_another_worker_when_its_own_is_killed(gateway: RunningGateway) -> None:
    replica = gateway.replicas[0]
    stream = events(replica, "POST", CHATS, RESUME, {**BODY, "max_tokens": LONG})
    before, answer_id, _ = take_some(stream, 20)
    gateway.service.workers[-1].kill()
    gateway.service.start_worker().wait_ready()
    assert_whole(before + list(stream), gateway.replicas[1], answer_id, LONG)
    assert len(gateway.service.stream(answer_id).attempts) == 2


def test_a_stream_continues_after_an_outage_of_redis(gateway: RunningGateway) -> None:
    stream = events(gateway.replicas[0], "POST", CHATS, RESUME, BODY)
    before, answer_id, _ = take_some(stream, 20)
    pid = gateway.service.client.info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        gateway.replicas[1].get("/health")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert_whole(before + list(stream), gateway.replicas[1], answer_id)


def test_a_stream_continues_after_redis_was_killed_and_restarted_with_its_file(gateway: RunningGateway) -> None:
    stream = events(gateway.replicas[0], "POST", CHATS, RESUME, BODY)
    before, answer_id, _ = take_some(stream, 20)
    gateway.service.server.kill()
    gateway.service.server.start()
    assert_whole(before + list(stream), gateway.replicas[1], answer_id)


TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SHORT: Any = {**BODY, "max_tokens": 12}
FORCED: Any = {"ignore_eos": False, "tools": [TOOL], "tool_choice": "required"}
CUT_BODIES: Any = {
    "choices": (CHATS, {**SHORT, "n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["e"], "ignore_eos": False}),
    "forced call": (
        CHATS,
        {**SHORT, "max_tokens": 40, **FORCED},
    ),
    "completion": (
        "/v1/completions",
        {name: value for name, value in SHORT.items() if name != "messages"}
        | {"prompt": "hello", "n": 2, "logprobs": 2, "echo": True, "stop": ["e"], "ignore_eos": False},
    ),
}


@pytest.mark.parametrize("kind", CUT_BODIES)
def test_a_stream_cut_at_any_event_continues_with_the_same_bytes(gateway: RunningGateway, kind: str) -> None:
    path, body = CUT_BODIES[kind]
    whole = list(events(gateway.replicas[0], "POST", path, RESUME, body))
    assert whole[-1] == b"data: [DONE]\n\n"
    for cut in range(1, len(whole)):
        _, answer_id, cursor = take_some(iter(whole[cut - 1 :]), 1)
        again = f"{path}/{answer_id}?stream=true"
        by_header = list(events(gateway.replicas[1], "GET", again, {"Last-Event-ID": cursor}))
        by_query = list(events(gateway.replicas[1], "GET", f"{again}&starting_after={cursor}", RESUME))
        assert by_header == by_query == whole[cut:]


async def test_only_the_key_that_sent_a_request_rejoins_it_and_only_at_an_event_of_its_own(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    register_model(redis_client, "tiny", max_model_len=999, worker="w", seen=5.0)
    keys = write_keys(tmp_path / "keys", "mine", "other")
    mine, other = bearer(keys["mine"]), bearer(keys["other"])
    body = {"model": "tiny", "prompt": "a", "max_tokens": 9}
    async with running_app(redis_server.url, keys=tmp_path / "keys") as (_, client):
        sending = asyncio.create_task(client.post("/v1/completions", json=body, headers=mine))
        request_id = await asyncio.to_thread(take, redis_client)
        begin(redis_client, request_id)
        end(redis_client, request_id)
        assert (await sending).status_code == 200
        path = f"/v1/completions/{request_id}"
        assert (await client.get(path, headers=mine)).json() == (await sending).json()
        for query in ("", "?stream=true", "?stream=true&starting_after=1-4.0"):
            assert (await client.get(path + query, headers=other)).status_code == 404
        assert (await client.get(path.replace("/completions", "/chat/completions"), headers=mine)).status_code == 404
        for cursor in ("x", "1-4", "1-2.0", "9-9.0"):
            refused = await client.get(f"{path}?stream=true&starting_after={cursor}", headers=mine)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_cursor")


async def test_concurrent_requests_with_one_idempotency_key_get_one_answer(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    register_model(redis_client, "tiny", max_model_len=999, worker="w", seen=5.0)
    headers = {"Idempotency-Key": "k"}
    body = {"model": "tiny", "prompt": "a", "max_tokens": 9, "stream": True}
    async with running_app(redis_server.url) as (_, first), running_app(redis_server.url) as (_, second):
        sending = [
            asyncio.create_task(each.post("/v1/completions", json=body, headers=headers)) for each in (first, second)
        ]
        request_id = await asyncio.to_thread(take, redis_client)
        begin(redis_client, request_id)
        end(redis_client, request_id)
        answers = await asyncio.gather(*sending)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].content == answers[1].content
    assert request_id.encode() in answers[0].content
    assert redis_client.keys("headrace:gw:req:*") == [f"headrace:gw:req:{request_id}".encode()]


@pytest.mark.parametrize("has_envelope", [True, False])
async def test_a_repeat_after_all_of_the_answer_has_expired_is_refused(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", has_envelope: bool
) -> None:
    register_model(redis_client, "tiny", max_model_len=999, worker="w", seen=5.0)
    headers, body = {"Idempotency-Key": "k"}, {"model": "tiny", "prompt": "a", "max_tokens": 9}
    async with running_app(redis_server.url) as (app, client):
        first = asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))
        request_id = await asyncio.to_thread(take, redis_client)
        begin(redis_client, request_id)
        end(redis_client, request_id)
        assert (await first).status_code == 200
        envelopes = app.state.gateway.envelopes
        envelope = await envelopes.find(request_id)
        acknowledged = redis_client.keys("headrace:lease:*") + redis_client.keys("headrace:ready:*")
        redis_client.delete(stream_key(request_id), ended_key(request_id), envelope_key(request_id), *acknowledged)
        if has_envelope:
            await envelopes.put(msgspec.structs.replace(envelope, created=envelope.created - 10_000))
        searches = 0
        search = app.state.gateway.client.is_known

        async def counted(name: str) -> bool | None:
            nonlocal searches
            searches += 1
            return await search(name)

        app.state.gateway.client.is_known = counted
        for again in [await client.post("/v1/completions", json=body, headers=headers) for _ in range(3)]:
            assert (again.status_code, again.json()["error"]["message"]) == (
                404,
                "the answer of this Idempotency-Key was deleted or has expired: choose a new key",
            )
        assert searches == 1


def has_ended_or_is_missed(gateway: RunningGateway, request_id: str) -> bool:
    """Return whether the worker has ended the request, or must end it when it can, as nobody has read it."""
    service = gateway.service
    return service.stream(request_id).end is not None or (
        Listeners(service.client).silence({request_id: 1}).get(request_id, 0) > 3
    )


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_request_whose_client_disconnected_is_cancelled(gateway: RunningGateway, is_stream: bool) -> None:
    client, replica = gateway.service.client, gateway.replicas[0]
    before = set(client.keys("headrace:listener:*"))
    body = {**BODY, "stream": is_stream}
    if not is_stream:
        del body["stream_options"]
    headers = RESUME | {"X-Headrace-Abandon-After": "1"}
    engine = gateway.service.workers[-1].engine_pid()
    os.kill(engine, signal.SIGSTOP)  # otherwise a fast machine finishes before the client is missed
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", replica.port, timeout=PATIENCE)) as connection:
            connection.request("POST", CHATS, json.dumps(body), headers)
            while not (news := set(client.keys("headrace:listener:*")) - before):
                pass
            if is_stream:
                assert connection.getresponse().status == 200
        request_id = news.pop().decode().removeprefix("headrace:listener:")
        gateway.service.wait_until(lambda: has_ended_or_is_missed(gateway, request_id))
    finally:
        with suppress(ProcessLookupError):  # the worker kills an engine that hangs
            os.kill(engine, signal.SIGCONT)
    log = gateway.service.wait_ended([request_id])[request_id]
    assert log.end is not None
    assert log.end["finish_reason"] == "cancelled"


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
