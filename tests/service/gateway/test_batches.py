"""Batches over HTTP with openai-python, on two replicas and a worker of a tiny model."""

import json
import re
import resource
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch, FileObject

from headrace_broker.keys import ended_key, queue_lists, result_key, stream_key
from headrace_broker.server.embedded import free_port
from service.gateway.gateway_process import PATIENCE, GatewayProcess
from service.gateway.held_line import HELD_MODEL, answer_held_line, register_held_model
from service.servers import make_server
from service.workers.service import Service

pytestmark = pytest.mark.rotated(
    "gateway/headrace_gateway/batch", "gateway/headrace_gateway/files", "gateway/headrace_gateway/redis"
)

URL: Any = "/v1/completions"
BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}


class Site:
    """Two replicas that share a directory of files, and one worker."""

    def __init__(self, service: Service, replicas: list[GatewayProcess], folder: Path) -> None:
        self.service = service
        self.replicas = replicas
        self.folder = folder

    def client(self, replica: int = 0) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.replicas[replica].url}/v1", api_key="none", max_retries=0)

    def holder(self, batch_id: str) -> GatewayProcess:
        """Return the replica that claimed the batch last."""
        taken = []
        for replica in self.replicas:
            lines = [json.loads(line) for line in replica.log_text().splitlines() if '"batch taken"' in line]
            taken += [(line["token"], replica) for line in lines if line["id"] == batch_id]
        return max(taken, key=lambda each: each[0])[1]

    def let_claims_run_out(self) -> None:
        due = "headrace:gw:work:batches"
        self.service.client.zadd(due, dict.fromkeys(self.service.client.zrange(due, 0, -1), 0), xx=True)


@pytest.fixture(scope="module")
def site(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("batches")
    with make_server(appendonly=True) as server:
        service = Service(server, model_folder, folder)
        replicas: list[GatewayProcess] = []
        try:
            worker = service.start_worker()
            register_held_model(service.client)  # gateways read what is registered once a second
            replicas += [
                GatewayProcess(
                    redis_url=server.url,
                    log=folder / f"{each}.log",
                    files=folder / "files",
                    batch_window=16,
                    metrics_port=free_port(),
                )
                for each in "ab"
            ]
            worker.wait_ready()
            for replica in replicas:
                replica.wait_ready()
            yield Site(service, replicas, folder / "files")
        finally:
            for replica in replicas:
                replica.close()
            service.close()


@pytest.fixture
def client(site: Site) -> Iterator[openai.OpenAI]:
    register_held_model(site.service.client)
    with site.client() as client:
        yield client


def lines_of(count: int, **changes: Any) -> list[dict[str, Any]]:
    return [
        {"custom_id": f"line-{number}", "method": "POST", "url": URL, "body": {**BODY, **changes}}
        for number in range(count)
    ]


def held_lines(count: int) -> list[dict[str, Any]]:
    """The first of these has no answer before the test gives it one."""
    lines = lines_of(count, max_tokens=16)
    lines[0]["body"]["model"] = HELD_MODEL
    return lines


def upload(client: openai.OpenAI, lines: list[dict[str, Any]]) -> FileObject:
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    response = client.files.with_raw_response.create(file=("in.jsonl", content), purpose="batch")
    return FileObject.model_validate_json(response.text, strict=True)


def begin(client: openai.OpenAI, lines: list[dict[str, Any]], window: Any = "24h") -> Batch:
    response = client.batches.with_raw_response.create(
        input_file_id=upload(client, lines).id, endpoint=URL, completion_window=window, metadata={"a": "b"}
    )
    return Batch.model_validate_json(response.text, strict=True)


def until(client: openai.OpenAI, batch_id: str, condition: Callable[[Batch], bool]) -> Batch:
    deadline = time.monotonic() + 2 * PATIENCE
    while True:
        batch = Batch.model_validate_json(client.batches.with_raw_response.retrieve(batch_id).text, strict=True)
        if condition(batch):
            return batch
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)


def has_ended(batch: Batch) -> bool:
    return batch.status in ("completed", "failed", "expired", "cancelled")


def read(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    text = client.files.content(file_id).text if file_id else ""
    return [json.loads(line) for line in text.splitlines()]


def assert_each_once(client: openai.OpenAI, batch: Batch, count: int) -> None:
    answers = read(client, batch.output_file_id) + read(client, batch.error_file_id)
    assert sorted(answer["custom_id"] for answer in answers) == sorted(f"line-{number}" for number in range(count))


def assert_forgotten(site: Site, request_id: str) -> None:
    """The keys in Redis do not grow with the batch."""
    kept = {key(request_id) for key in (stream_key, result_key, ended_key)}
    lives = {key: site.service.client.ttl(key) for key in kept}
    assert all(life == -2 or 0 <= life <= 30 for life in lives.values()), lives


def completed(batch: Batch) -> int:
    assert batch.request_counts is not None
    return batch.request_counts.completed


def test_a_batch_is_answered_and_its_output_is_a_file(site: Site, client: openai.OpenAI) -> None:
    batch = begin(client, lines_of(20))
    assert batch.status == "validating"
    batch = until(client, batch.id, has_ended)
    assert batch.status == "completed", batch
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 20, "completed": 20, "failed": 0}
    assert batch.error_file_id is None
    assert batch.model == "tiny"
    assert batch.metadata == {"a": "b"}
    answers = read(client, batch.output_file_id)
    assert_each_once(client, batch, 20)
    usage = [answer["response"]["body"]["usage"] for answer in answers]
    assert batch.usage is not None
    assert batch.usage.output_tokens == sum(each["completion_tokens"] for each in usage)
    for answer in answers:
        assert_forgotten(site, answer["response"]["request_id"])
    with site.client(1) as other:
        assert batch.id in [each.id for each in other.batches.list(limit=1)]
        assert other.files.retrieve(batch.output_file_id or "").purpose == "batch_output"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_another_replica_takes_over_from_a_dead_or_paused_one(
    site: Site, client: openai.OpenAI, number: signal.Signals
) -> None:
    batch = begin(client, held_lines(100))
    until(client, batch.id, lambda batch: completed(batch) > 10)
    holder = site.holder(batch.id)
    other = site.replicas.index(holder) ^ 1
    holder.process.send_signal(number)
    try:
        site.let_claims_run_out()
        with site.client(other) as client:
            until(client, batch.id, lambda _: site.holder(batch.id) is not holder)
            holder.process.send_signal(signal.SIGCONT)
            answer_held_line(site.service.client)
            batch = until(client, batch.id, has_ended)
            assert batch.status == "completed"
            assert_each_once(client, batch, 100)
            assert site.holder(batch.id) is not holder
    finally:
        holder.process.send_signal(signal.SIGCONT)
        if number == signal.SIGKILL:
            holder.process.wait()
            holder.start()
            holder.wait_ready()


def set_room(replica: GatewayProcess, most: int) -> None:
    """Bound the size of every file that the replica writes, as a full disk does."""
    resource.prlimit(replica.process.pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


def waiting_for_storage(replica: GatewayProcess) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{replica.metrics_port}/metrics") as response:
        text = response.read().decode()
    (value,) = re.findall(r"(?m)^headrace_gateway_batches_waiting_for_storage (\S+)$", text)
    return float(value)


def test_a_batch_waits_while_the_disk_is_full(site: Site, client: openai.OpenAI) -> None:
    batch = begin(client, held_lines(60))
    until(client, batch.id, lambda batch: completed(batch) > 10)
    holder = site.holder(batch.id)
    set_room(holder, 1)
    try:
        answer_held_line(site.service.client)
        until(client, batch.id, lambda _: waiting_for_storage(holder) == 1)
        assert completed(client.batches.retrieve(batch.id)) < 60
    finally:
        set_room(holder, resource.RLIM_INFINITY)
    batch = until(client, batch.id, has_ended)
    assert batch.status == "completed"
    assert_each_once(client, batch, 60)


def test_a_cancelled_batch_keeps_what_was_finished(site: Site, client: openai.OpenAI) -> None:
    batch = begin(client, held_lines(60))
    until(client, batch.id, lambda batch: completed(batch) > 10)
    with site.client(1) as other:
        assert other.batches.cancel(batch.id).status == "cancelling"
    batch = until(client, batch.id, has_ended)
    assert batch.status == "cancelled"
    assert batch.output_file_id
    assert_each_once(client, batch, 60)
    errors = read(client, batch.error_file_id)
    assert {error["error"]["code"] for error in errors} == {"batch_cancelled"}
    assert {error["response"] for error in errors} == {None}
    assert client.batches.cancel(batch.id).status == "cancelled"
    site.service.wait_settled(PATIENCE)


def test_the_lines_of_a_batch_are_due_in_turn_and_it_says_when_it_is_expected(
    site: Site, client: openai.OpenAI
) -> None:
    lines = held_lines(4)
    for line in lines:
        line["body"]["model"] = HELD_MODEL
    batch = begin(client, lines, window="4h")
    expires = batch.expires_at
    assert expires is not None
    assert (batch.model_extra or {})["expected_at"] == expires
    queue = f"headrace.{HELD_MODEL}"

    def bodies() -> list[bytes]:
        return [body for name in queue_lists(queue) for body in site.service.client.lrange(name, 0, -1)]

    until(client, batch.id, lambda _: len(bodies()) == 4)
    dues = sorted(json.loads(body)["headers"]["due"] for body in bodies())
    apart = (4 * 3600 - 600) / 4  # the first ten minutes are left out
    assert dues == pytest.approx([expires - 3 * apart, expires - 2 * apart, expires - apart, expires], abs=2)
    client.batches.cancel(batch.id)
    batch = until(client, batch.id, has_ended)
    assert (batch.model_extra or {})["expected_at"] is None


@pytest.mark.parametrize("window", ["soonest", "1h"])
def test_the_lines_of_a_batch_that_is_wanted_soonest_or_in_an_hour_have_no_due_time(
    site: Site, client: openai.OpenAI, window: str
) -> None:
    batch = begin(client, held_lines(1), window=window)
    assert batch.completion_window == window
    assert batch.expires_at == batch.created_at + (86_400 if window == "soonest" else 3600)
    queue = f"headrace.{HELD_MODEL}"
    until(client, batch.id, lambda _: bool(site.service.client.llen(queue_lists(queue)[-1])))
    (body,) = site.service.client.lrange(queue_lists(queue)[-1], 0, -1)
    assert "due" not in json.loads(body)["headers"]
    client.batches.cancel(batch.id)
    until(client, batch.id, has_ended)


def test_lines_without_an_answer_expire_with_the_window(client: openai.OpenAI) -> None:
    batch = begin(client, held_lines(60), window="4s")
    batch = until(client, batch.id, has_ended)
    assert batch.status == "expired"
    assert_each_once(client, batch, 60)
    assert {error["error"]["code"] for error in read(client, batch.error_file_id)} == {"batch_expired"}
    assert batch.request_counts is not None
    assert batch.request_counts.total == batch.request_counts.completed + batch.request_counts.failed


def test_a_batch_survives_the_deletion_of_its_input_and_the_stop_of_its_replica(
    site: Site, client: openai.OpenAI
) -> None:
    batch = begin(client, held_lines(60))
    assert client.files.delete(batch.input_file_id).deleted
    until(client, batch.id, lambda batch: completed(batch) > 0)
    holder = site.holder(batch.id)
    other = site.replicas.index(holder) ^ 1
    holder.close()
    try:
        with site.client(other) as client:
            until(client, batch.id, lambda _: site.holder(batch.id) is site.replicas[other])
            answer_held_line(site.service.client)
            batch = until(client, batch.id, has_ended)
            assert batch.status == "completed"
            assert_each_once(client, batch, 60)
    finally:
        holder.start()
        holder.wait_ready()


def test_every_request_of_a_line_with_several_prompts_expires_early(site: Site, client: openai.OpenAI) -> None:
    batch = until(client, begin(client, lines_of(3, prompt=["hello", "there", "you"])).id, has_ended)
    for answer in read(client, batch.output_file_id):
        request_id = answer["response"]["request_id"]
        for each in (request_id, f"{request_id}.1", f"{request_id}.2"):
            assert site.service.client.exists(stream_key(each))
            assert_forgotten(site, each)


def test_a_batch_with_only_errors_has_no_output(site: Site, client: openai.OpenAI) -> None:
    batch = until(client, begin(client, lines_of(3, prompt="a" * 5000)).id, has_ended)
    assert batch.status == "completed"
    assert batch.output_file_id is None
    errors = read(client, batch.error_file_id)
    assert [error["response"]["status_code"] for error in errors] == [400] * 3
    assert {error["response"]["body"]["error"]["code"] for error in errors} == {"context_length_exceeded"}
    for error in errors:
        assert_forgotten(site, error["response"]["request_id"])


@pytest.mark.parametrize(
    ("url", "field", "kind"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}, "chat.completion"),
        ("/v1/responses", {"input": "hello"}, "response"),
    ],
)
def test_other_endpoints_are_served(client: openai.OpenAI, url: Any, field: dict[str, Any], kind: str) -> None:
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": url,
            "body": {"model": "tiny", **field, "seed": number},
        }
        for number in range(3)
    ]
    file = upload(client, lines)
    made = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    batch = until(client, made.id, has_ended)
    assert {answer["response"]["body"]["object"] for answer in read(client, batch.output_file_id)} == {kind}
    assert_each_once(client, batch, 3)
    assert batch.usage is not None
    assert batch.usage.output_tokens > 0


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (b"", "empty_file", None),
        (b"{\n", "invalid_json_line", 1),
        (json.dumps(lines_of(1)[0] | {"url": "/v1/chat/completions"}).encode(), "url_mismatch", 1),
        (json.dumps(lines_of(1)[0] | {"url": "/v1/nothing"}).encode(), "url_mismatch", 1),
        (b"\n".join([json.dumps(lines_of(1)[0]).encode()] * 2), "duplicate_custom_id", 2),
        (json.dumps(lines_of(1, stream=True)[0]).encode(), "invalid_request", 1),
        (json.dumps(lines_of(1, model="other")[0]).encode(), "model_not_found", 1),
        (b"x\n" * 50_001, "too_many_tasks", None),
        (b"\n" * 8_000_000, "too_many_tasks", None),
    ],
)
def test_an_invalid_input_fails_the_batch(client: openai.OpenAI, content: bytes, code: str, line: int | None) -> None:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
    batch = until(client, made.id, has_ended)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data
    problem = batch.errors.data[0]
    assert (problem.code, problem.line) == (code, line)
    assert batch.output_file_id is batch.error_file_id is None
