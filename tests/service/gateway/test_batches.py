"""Batches over HTTP with openai-python, on two replicas and a worker of a tiny model."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch, FileObject

from service.gateway.gateway_process import PATIENCE, GatewayProcess
from service.servers import make_server
from service.workers.service import Service

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
        """The replica that took the batch last."""
        taken = []
        for replica in self.replicas:
            lines = [line for line in replica.log_text().splitlines() if f"batch taken: id={batch_id}" in line]
            taken += [(int(line.partition("token=")[2].split()[0].rstrip('",}')), replica) for line in lines]
        return max(taken, key=lambda each: each[0])[1]


@pytest.fixture(scope="module")
def site(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("batches")
    with make_server(appendonly=True) as server:
        service = Service(server, model_folder, folder)
        replicas: list[GatewayProcess] = []
        try:
            worker = service.start_worker()
            replicas += [
                GatewayProcess(
                    redis_url=server.url, log=folder / f"{each}.log", files=folder / "files", batch_window=16
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
    with site.client() as client:
        yield client


def lines_of(count: int, **changes: Any) -> list[dict[str, Any]]:
    return [
        {"custom_id": f"line-{number}", "method": "POST", "url": URL, "body": {**BODY, **changes}}
        for number in range(count)
    ]


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
    with site.client(1) as other:
        assert batch.id in [each.id for each in other.batches.list(limit=1)]
        assert other.files.retrieve(batch.output_file_id or "").purpose == "batch_output"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_another_replica_takes_over_from_one_that_is_gone_or_paused(site: Site, number: signal.Signals) -> None:
    with site.client() as client:
        batch = begin(client, lines_of(300, max_tokens=16))
        until(client, batch.id, lambda batch: completed(batch) > 10)
    holder = site.holder(batch.id)
    other = site.replicas.index(holder) ^ 1
    holder.process.send_signal(number)
    try:
        with site.client(other) as client:
            before = completed(client.batches.retrieve(batch.id))
            until(client, batch.id, lambda batch: completed(batch) > before)
            holder.process.send_signal(signal.SIGCONT)
            batch = until(client, batch.id, has_ended)
            assert batch.status == "completed"
            assert_each_once(client, batch, 300)
            assert site.holder(batch.id) is not holder
    finally:
        holder.process.send_signal(signal.SIGCONT)
        if number == signal.SIGKILL:
            holder.process.wait()
            holder.start()
            holder.wait_ready()
