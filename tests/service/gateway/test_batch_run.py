"""A batch on a real server, with the test as the worker: the messages in the queue, and what is sent again."""

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import redis

from headrace_broker import AsyncClient, BrokerSettings
from headrace_broker.keys import ended_key, queue_lists
from headrace_broker.models.registry import register_model
from headrace_broker.results import ErrorInfo
from headrace_broker.server.connections import connect_async
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.streams.hub import StreamHub
from headrace_broker.streams.writer import StreamWrite, StreamWriter
from headrace_cli.batch.batch_run import BatchRun, BatchSettings
from headrace_gateway.batch import line as batch_line
from headrace_gateway.batch.line import BatchLine, LineReader, read_line
from headrace_gateway.batch.line_request import LineAnswer, LineRequests
from headrace_gateway.errors import ApiError, BatchError
from headrace_gateway.keys.api_key import ANYONE, ApiKey
from headrace_gateway.keys.model_catalog import ModelCatalog
from headrace_gateway.requests import body as request_body
from headrace_gateway.requests.body import SMALL_BYTES
from headrace_gateway.requests.body_process import BodyProcess
from service.gateway.batch_process import read_lines, write_input
from service.gateway.in_process import running_app
from service.gateway.test_gateway_command import begin, end, take
from service.redis_users import ServerWithUsers, url_of

BODY: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 9}
COMPLETIONS = "/v1/completions"


def as_sent(body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": body}


def line_of(body: dict[str, Any]) -> BatchLine:
    return read_line(json.dumps(as_sent(body)).encode())


LINE = line_of(BODY)


@pytest.fixture(autouse=True)
def model(redis_client: "redis.Redis") -> None:
    register_model(redis_client, "tiny", max_model_len=999, worker="w", seen=5.0)


@asynccontextmanager
async def line_requests(settings: BrokerSettings, *waits: Any, **options: Any) -> AsyncIterator[LineRequests]:
    """Return the requests of one run. `waits` collects the calls of `on_waiting`."""
    told = waits[0] if waits else []
    redis = connect_async(settings.redis_url)
    hub = StreamHub(redis, max_outage_seconds=math.inf)
    options = {"secret": "s" * 32, "key": ApiKey("batch", best_priority=9), "pause": 0.01, **options}
    async with AsyncClient(settings) as client:
        try:
            yield LineRequests(client, hub, ModelCatalog(client), on_waiting=told.append, **options)
        finally:
            await hub.aclose()
            await redis.aclose()


@asynccontextmanager
async def asking(requests: LineRequests, line: BatchLine = LINE) -> AsyncIterator["asyncio.Task[LineAnswer]"]:
    task = asyncio.create_task(requests.answer(line))
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def answered(answer: LineAnswer) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(answer.line)
    return line


async def test_a_window_of_lines_lies_in_the_queue_at_the_last_priority(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    write_input(tmp_path / "in", [{**BODY, "priority": 0}] * 7, COMPLETIONS)
    out, errors = tmp_path / "out", tmp_path / "errors"
    last = queue_lists("headrace.tiny")[-1]
    settings = BatchSettings(str(tmp_path / "in"), str(out), str(errors), redis_server.url, window=3)
    running = asyncio.create_task(BatchRun(settings).run())
    for number, waiting in enumerate([3, 3, 3, 3, 3, 2, 1]):
        await until(lambda waiting=waiting: redis_client.llen(last) == waiting)  # type: ignore[misc]
        request_id = json.loads(redis_client.rpop(last))["headers"]["id"]
        begin(redis_client, request_id)
        end(redis_client, request_id)
        await until(lambda done=number + 1: len(read_lines(out)) == done)  # type: ignore[misc]
    await running
    assert not errors.exists()


async def test_a_run_waits_while_the_queue_is_full(redis_server: EmbeddedServer, redis_client: "redis.Redis") -> None:
    redis_client.lpush("headrace.tiny", *["{}"] * 5)
    told: list[str] = []
    async with (
        line_requests(BrokerSettings(redis_server.url, max_queued_requests=5), told) as requests,
        asking(requests) as asked,
    ):
        await until(lambda: len(told) > 2)
        assert "the queue is full" in told
        redis_client.delete("headrace.tiny")
        request_id = await asyncio.to_thread(take, redis_client)
        begin(redis_client, request_id)
        end(redis_client, request_id)
        assert answered(await asked)["response"]["status_code"] == 200


async def test_a_request_that_redis_has_lost_is_sent_again(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    async with (
        line_requests(BrokerSettings(redis_server.url), resend_after=0.05) as requests,
        asking(requests) as asked,
    ):
        first = await asyncio.to_thread(take, redis_client)
        redis_client.flushall()
        assert await asyncio.to_thread(take, redis_client) == first
        begin(redis_client, first)
        end(redis_client, first)
        assert answered(await asked)["response"]["request_id"] == first


async def test_a_run_waits_until_its_model_is_registered_again(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    redis_client.flushall()
    told: list[str] = []
    async with line_requests(BrokerSettings(redis_server.url), told) as requests, asking(requests) as asked:
        await until(lambda: len(told) > 2)
        register_model(redis_client, "tiny", max_model_len=999, worker="w", seen=5.0)
        request_id = await asyncio.to_thread(take, redis_client)
        begin(redis_client, request_id)
        end(redis_client, request_id)
        assert answered(await asked)["response"]["status_code"] == 200


async def test_a_run_waits_while_redis_is_out_of_memory(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    told: list[str] = []
    redis_client.config_set("maxmemory", 1)
    try:
        async with line_requests(BrokerSettings(redis_server.url), told) as requests, asking(requests) as asked:
            await until(lambda: len(told) > 2)
            redis_client.config_set("maxmemory", 0)
            request_id = await asyncio.to_thread(take, redis_client)
            begin(redis_client, request_id)
            end(redis_client, request_id)
            assert answered(await asked)["response"]["status_code"] == 200
    finally:
        redis_client.config_set("maxmemory", 0)


@pytest.mark.parametrize("name", ["in", "out"])
async def test_the_error_file_must_differ_from_input_and_output(
    redis_server: EmbeddedServer, tmp_path: Path, name: str
) -> None:
    write_input(tmp_path / "in", [BODY], COMPLETIONS)
    files = [str(tmp_path / each) for each in ("in", "out", name)]
    with pytest.raises(BatchError, match=r"errors need another file|is not an answer of a batch"):
        await BatchRun(BatchSettings(*files, redis_server.url)).run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("is_begun", [False, True])
async def test_a_resumed_run_continues_the_requests_of_the_previous_one(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", is_begun: bool
) -> None:
    settings = BrokerSettings(redis_server.url)
    async with line_requests(settings) as requests, asking(requests):
        first = await asyncio.to_thread(take, redis_client)
        if is_begun:
            begin(redis_client, first)
    async with line_requests(settings) as requests, asking(requests) as asked:
        if not is_begun:
            begin(redis_client, first)
        end(redis_client, first)
        assert answered(await asked)["response"]["request_id"] == first
    async with line_requests(settings, secret="t" * 32) as requests, asking(requests):
        assert await asyncio.to_thread(take_other, redis_client, first) != first


def take_other(client: "redis.Redis", known: str) -> str:
    """Return the next request with another id: the queue may have a second message with this one."""
    while (found := take(client)) == known:
        pass
    return found


async def test_a_request_whose_stream_expired_unread_is_sent_again(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    settings = BrokerSettings(redis_server.url)
    async with line_requests(settings) as requests, asking(requests):
        first = await asyncio.to_thread(take, redis_client)
    redis_client.set(ended_key(first), "1")  # its stream has expired
    async with line_requests(settings) as requests, asking(requests) as asked:
        second = await asyncio.to_thread(take_other, redis_client, first)
        begin(redis_client, second)
        end(redis_client, second)
        assert answered(await asked)["response"]["request_id"] == second


async def test_a_request_whose_streams_all_expire_becomes_an_error(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_broker.streams.subscriber.BLOCK_SECONDS", 0.1)
    async with line_requests(BrokerSettings(redis_server.url)) as requests, asking(requests) as asked:
        redis_client.set(ended_key(requests.answer_id(LINE, 0)), "1")  # sent by an earlier run, so it does not count
        for attempt in range(1, 4):
            request_id = await asyncio.to_thread(take, redis_client)
            assert request_id == requests.answer_id(LINE, attempt)
            redis_client.set(ended_key(request_id), "1")  # the reader finds it when its read times out
        answer = await asked
    assert not answer.is_success
    assert (answered(answer)["response"], answered(answer)["error"]["code"]) == (None, "answer_lost")


async def test_a_request_beyond_the_quota_is_sent_again(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    async with line_requests(BrokerSettings(redis_server.url)) as requests, asking(requests) as asked:
        first = await asyncio.to_thread(take, redis_client)
        StreamWriter(redis_client, 600).end_unclaimed(first, "rejected", ErrorInfo("quota_exceeded", "too many"))
        second = await asyncio.to_thread(take, redis_client)
        assert second != first
        begin(redis_client, second)
        end(redis_client, second)
        assert answered(await asked)["response"]["status_code"] == 200


async def test_a_request_that_failed_is_an_error_with_its_status(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    two = line_of({**BODY, "prompt": ["a", "b"]})
    async with line_requests(BrokerSettings(redis_server.url)) as requests, asking(requests, two) as asked:
        first, second = sorted([await asyncio.to_thread(take, redis_client) for _ in range(2)])
        begin(redis_client, first)
        error = ErrorInfo("engine_error", "it broke")
        StreamWriter(redis_client, 600).publish([StreamWrite.end(first, 1, 4, finish_reason="error", error=error)])
        answer = await asked
        assert not answer.is_success
        line = answered(answer)
        assert (line["response"]["status_code"], line["error"]) == (500, None)
        assert line["response"]["body"]["error"]["code"] == "engine_error"
        assert StreamWriter(redis_client, 600).claim(second, "w").ended is not None, "nobody waits for it"


async def test_a_large_line_is_read_in_another_process_and_answered_like_a_small_one(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_here: list[bytes] = []

    def read_object(raw: bytes, *names: str) -> dict[str, Any]:
        read_here.append(raw)
        return request_body.read_object(raw, *names)

    monkeypatch.setattr(batch_line, "read_object", read_object)
    small, large = (json.dumps({**as_sent(BODY), "custom_id": name}).encode() for name in ("small", "large"))
    content = small + b"\n" + large + b" " * SMALL_BYTES + b"\n"
    async with running_app(redis_server.url, files=tmp_path / "files") as (_, client):
        form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", content)}}
        uploaded = (await client.post("/v1/files", **form)).json()
        fields = {"input_file_id": uploaded["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        batch = (await client.post("/v1/batches", json=fields)).json()
        for _ in range(2):
            request_id = await asyncio.to_thread(take, redis_client)
            begin(redis_client, request_id)
            end(redis_client, request_id)
        while (batch := (await client.get(f"/v1/batches/{batch['id']}")).json())["status"] != "completed":
            await asyncio.sleep(0.01)
        output = (await client.get(f"/v1/files/{batch['output_file_id']}/content")).text
    answers = {line["custom_id"]: line for line in map(json.loads, output.splitlines())}
    texts = [answers[name]["response"]["body"]["choices"][0]["text"] for name in ("small", "large")]
    assert texts == ["four", "four"]
    assert answers["large"]["id"] == batch_line.read_line(large).id
    assert {json.loads(raw)["custom_id"] for raw in read_here[:-1]} == {"small"}


async def test_a_line_is_read_again_if_the_process_that_reads_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = LINE.raw + b" " * SMALL_BYTES
    died = ApiError(500, "server_error", "internal_error", "it died")
    bodies = BodyProcess()
    monkeypatch.setattr(bodies, "run", AsyncMock(side_effect=[died, died, LINE, died, died, died]))
    reader = LineReader(bodies, ANYONE)
    assert await reader.line(raw) == LINE
    with pytest.raises(ApiError, match="it died"):
        await reader.line(raw)


async def test_the_redis_user_of_gateways_may_run_batches(tmp_path: Path) -> None:
    write_input(tmp_path / "in", [BODY], COMPLETIONS)
    with ServerWithUsers(tmp_path) as server, redis.Redis.from_url(url_of(server, "admin")) as admin:
        register_model(admin, "tiny", max_model_len=999, worker="w", seen=5.0)
        files = [str(tmp_path / name) for name in ("in", "out", "errors")]
        running = asyncio.create_task(BatchRun(BatchSettings(*files, url_of(server, "gateway"))).run())
        request_id = await asyncio.to_thread(take, admin)
        begin(admin, request_id)
        end(admin, request_id)
        await running
        assert admin.acl_log() == []


ALONE = """
import sys
sys.modules.update(dict.fromkeys({missing!r}))
from headrace_cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        (["torch", "transformers", "rich", "pydantic", "pydantic_settings"], "Send every line of INPUT"),
        (["msgspec"], "`headrace batch` needs the extra headrace[gateway]"),
    ],
)
def test_the_command_needs_what_a_gateway_needs(missing: list[str], told: str) -> None:
    command = [sys.executable, "-c", ALONE.format(missing=missing), "batch", "run", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told in done.stdout + done.stderr
