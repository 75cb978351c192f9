"""Batches of embeddings, rerank, score and classify: over HTTP, and by `headrace batch run`, whatever is killed."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai.types import Batch

from engine.pooling.tiny_pooling_models import NORMALIZE, SIZE, add_modules, build, pooling
from headrace_broker import Client
from headrace_broker.keys import stream_key
from headrace_gateway.batch.work import MAX_INPUTS
from service.gateway.batch_process import BatchProcess, read_lines, write_input
from service.gateway.gateway_process import GatewayProcess
from service.gateway.held_line import HELD_MODEL, answer_held_line, forget_held_model, register_held_model
from service.gateway.test_batches import Site, assert_forgotten, completed, has_ended, read, until, upload
from service.servers import make_server
from service.workers.service import DEADLINE, Service
from service.workers.worker_process import WorkerProcess

pytestmark = pytest.mark.rotated(
    "gateway/headrace_gateway/batch", "gateway/headrace_gateway/pooling", "cli/headrace_cli/batch"
)

BI, CROSS, CHAT = "bi", "cross", "tiny"
EMBEDDINGS: Any = "/v1/embeddings"
LONG = "mill " * 600
HELD_ROW = struct.pack("<2f", 0.25, -1.0)
WORDS = ["the", "mill", "wheel", "river", "lake", "stone", "holds", "water", "race", "channel"]


class PoolingSite(Site):
    """Two replicas, and a worker each of a model that embeds, one that scores and classifies, and one that chats."""

    def __init__(self, service: Service, replicas: list[GatewayProcess], folder: Path) -> None:
        super().__init__(service, replicas, folder)
        self.workers: dict[str, WorkerProcess] = {}

    def start_worker(self, name: str) -> WorkerProcess:
        options = {} if name == CHAT else {"model": str(self.folder.parent / name), "served_model_name": name}
        self.workers[name] = self.service.start_worker(dtype="float32", **options)
        return self.workers[name]


@pytest.fixture(scope="module")
def site(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolingSite]:
    folder = tmp_path_factory.mktemp("pooling-batches")
    build(folder / BI, "bert")
    add_modules(folder / BI, [pooling(), NORMALIZE])
    build(folder / CROSS, "bert", suffix="ForSequenceClassification", config={"num_labels": 1})
    with make_server(appendonly=True) as server:
        service = Service(server, model_folder, folder)
        replicas = [
            GatewayProcess(redis_url=server.url, log=folder / f"{each}.log", files=folder / "files", batch_window=32)
            for each in "ab"
        ]
        site = PoolingSite(service, replicas, folder / "files")
        try:
            for worker in [site.start_worker(name) for name in (BI, CROSS, CHAT)]:
                worker.wait_ready()
            for replica in replicas:
                replica.wait_ready()
            yield site
        finally:
            for replica in replicas:
                replica.close()
            service.close()


@pytest.fixture
def client(site: PoolingSite) -> Iterator[openai.OpenAI]:
    with site.client() as client:
        yield client


@pytest.fixture
def held_line(site: PoolingSite) -> Iterator[dict[str, Any]]:
    """Has no answer before the test gives it one."""
    register_held_model(site.service.client, "embed")
    yield {"model": HELD_MODEL, "input": "mill"}
    forget_held_model(site.service.client)


def bodies(count: int) -> list[dict[str, Any]]:
    """Return calls of 1 to 3 texts each. No two have the same texts."""
    return [
        {
            "model": BI,
            "input": [f"{WORDS[number % 10]} {WORDS[number // 10 % 10]} {number} {each}" for each in range(size)],
            "encoding_format": "base64",
        }
        for number in range(count)
        for size in [1 + number % 3]
    ]


def lines_of(bodies: Sequence[dict[str, Any]], url: str = EMBEDDINGS) -> list[dict[str, Any]]:
    return [
        {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies)
    ]


def begin(client: openai.OpenAI, lines: list[dict[str, Any]], url: Any = EMBEDDINGS, window: Any = "24h") -> Batch:
    return client.batches.create(input_file_id=upload(client, lines).id, endpoint=url, completion_window=window)


def asked(site: PoolingSite, url: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Return what the gateway answers."""
    answer = httpx2.post(site.replicas[0].url + url, json=body, timeout=DEADLINE)
    return answer.status_code, answer.json()


def assert_each_once(site: PoolingSite, answers: list[dict[str, Any]], count: int, *, but: Sequence[int] = ()) -> None:
    """Check that each line has one answer, and the rows of its own texts. `but` lines have another model."""
    assert sorted(each["custom_id"] for each in answers) == sorted(f"line-{number}" for number in range(count))
    rows = {each["custom_id"]: [row["embedding"] for row in each["response"]["body"]["data"]] for each in answers}
    expected = bodies(count)
    for number in set(range(0, count, 7)) - set(but):
        _, body = asked(site, EMBEDDINGS, expected[number])
        assert rows[f"line-{number}"] == [row["embedding"] for row in body["data"]]


def streams(site: PoolingSite) -> set[bytes]:
    return set(site.service.client.keys("headrace:stream:*"))


def attempts_of(site: PoolingSite, key: bytes) -> list[int]:
    return [
        int(entry.split(b"-")[0]) for entry, fields in site.service.client.xrange(key) if fields[b"type"] == b"start"
    ]


ANY_LINES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {"model": CHAT, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "seed": 1},
    ),
    (EMBEDDINGS, {"model": BI, "input": ["mill", "river"]}),
    (EMBEDDINGS, {"model": BI, "input": [5, 6, 7], "encoding_format": "base64"}),
    (EMBEDDINGS, {"model": BI, "input": [f"mill {number}" for number in range(600)]}),
    (EMBEDDINGS, {"model": BI, "input": ["mill", LONG], "truncate_prompt_tokens": -1, "unknown_field": 3}),
    (
        "/v1/rerank",
        {"model": CROSS, "query": "mill", "documents": ["river", {"text": "mill"}], "return_documents": True},
    ),
    ("/v1/score", {"model": CROSS, "text_1": "mill", "text_2": ["river", "wheel"]}),
    ("/v1/classify", {"model": CROSS, "input": ["mill", "river"]}),
    (EMBEDDINGS, {"model": BI, "input": ["mill", LONG]}),
    (EMBEDDINGS, {"model": BI, "input": [[5]] * 299 + [[10**9]]}),
]
"""The worker refuses the last two."""


def without_ids(body: dict[str, Any]) -> dict[str, Any]:
    body = {name: value for name, value in body.items() if name not in ("id", "created")}
    if "usage" in body:
        body["usage"] = {**body["usage"], "prompt_tokens_details": None}  # what the prefix cache had
    return body


def test_a_mixed_file_gets_the_answers_of_the_gateway(site: PoolingSite, tmp_path: Path) -> None:
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        for number, (url, body) in enumerate(ANY_LINES)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    BatchProcess(tmp_path, "in.jsonl", "out.jsonl", redis_url=site.service.url).end(3)
    answers = {each["custom_id"]: each for each in read_lines(tmp_path / "out.jsonl")}
    errors = {each["custom_id"]: each for each in read_lines(tmp_path / "out.errors.jsonl")}
    assert set(errors) == {"8", "9"}
    for number, (url, body) in enumerate(ANY_LINES):
        line = (answers | errors)[str(number)]
        status, expected = asked(site, url, body)
        response = line["response"]
        assert (response["status_code"], line["error"]) == (status, None)
        assert without_ids(response["body"]) == without_ids(expected)
        if "id" in expected:
            assert response["body"]["id"] == response["request_id"]
    assert answers["4"]["response"]["truncated"] == [1]
    assert answers["4"]["response"]["ignored"] == ["unknown_field"]
    assert "truncated" not in answers["3"]["response"]
    assert errors["9"]["response"]["body"]["error"]["param"] == "input[299]"


def test_a_run_that_is_killed_twice_answers_each_line_once(
    site: PoolingSite, tmp_path: Path, held_line: dict[str, Any]
) -> None:
    out = tmp_path / "out.jsonl"
    write_input(tmp_path / "in.jsonl", [held_line, *bodies(400)[1:]], EMBEDDINGS)
    command = ("in.jsonl", "out.jsonl", "--window", "12")
    before = streams(site)
    for least in (20, 120):
        run = BatchProcess(tmp_path, *command, redis_url=site.service.url)
        run.wait_until(lambda least=least: out.exists() and out.read_bytes().count(b"\n") >= least)  # type: ignore[misc]
        run.kill()
    run = BatchProcess(tmp_path, *command, redis_url=site.service.url)
    answer_held_line(site.service.client, HELD_ROW)
    run.end(0)
    sent = streams(site) - before
    assert len(sent) == 400
    assert {tuple(attempts_of(site, key)) for key in sent} == {(1,)}, "a request ran twice"
    assert_each_once(site, read_lines(out), 400, but=[0])


def test_a_resumed_line_finds_all_of_its_messages(site: PoolingSite, tmp_path: Path, held_line: dict[str, Any]) -> None:
    """The run is killed when its line of three messages has been sent, and has none of its rows."""
    long = {**held_line, "input": ["mill"] * 513}
    write_input(tmp_path / "in.jsonl", [long], EMBEDDINGS)
    run = BatchProcess(tmp_path, "in.jsonl", "out.jsonl", redis_url=site.service.url)
    run.wait_until(lambda: len(held_ids(site)) == 3)
    run.kill()
    first = set(held_ids(site))
    assert sorted(each.partition(".")[2] for each in first) == ["", "1", "2"]
    run = BatchProcess(tmp_path, "in.jsonl", "out.jsonl", redis_url=site.service.url)
    run.wait_until(lambda: len(held_ids(site)) == 6)
    assert set(held_ids(site)) == first
    run.kill()


def held_ids(site: PoolingSite) -> list[str]:
    """Return the ids of the messages that wait for the held model."""
    client = site.service.client
    lists = [key for key in client.keys(f"headrace.{HELD_MODEL}*") if client.type(key) == b"list"]
    return [json.loads(raw)["headers"]["id"] for key in lists for raw in client.lrange(key, 0, -1)]


def test_a_batch_survives_a_killed_gateway_and_a_killed_worker(
    site: PoolingSite, client: openai.OpenAI, held_line: dict[str, Any]
) -> None:
    batch = begin(client, lines_of([held_line, *bodies(300)[1:]]))
    until(client, batch.id, lambda batch: completed(batch) > 10)
    site.workers[BI].kill()
    holder = site.holder(batch.id)
    other = site.replicas.index(holder) ^ 1
    holder.kill()
    try:
        site.start_worker(BI).wait_ready()
        site.let_claims_run_out()
        with site.client(other) as client:
            until(client, batch.id, lambda _: site.holder(batch.id) is not holder)
            answer_held_line(site.service.client, HELD_ROW)
            batch = until(client, batch.id, has_ended)
            answers = read(client, batch.output_file_id)
    finally:
        holder.start()
        holder.wait_ready()
    assert (batch.status, batch.error_file_id) == ("completed", None)
    assert_each_once(site, answers, 300, but=[0])
    assert batch.usage is not None
    used = [each["response"]["body"]["usage"]["prompt_tokens"] for each in answers]
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (sum(used), 0)


@pytest.mark.parametrize("stop", ["cancelled", "expired"])
def test_a_stopped_batch_keeps_the_rows_that_it_has(
    site: PoolingSite, client: openai.OpenAI, held_line: dict[str, Any], stop: str
) -> None:
    held = {**held_line, "input": ["mill"] * 300}
    batch = begin(client, lines_of([held, *bodies(60)[1:]]), window="6s" if stop == "expired" else "24h")
    if stop == "cancelled":
        until(client, batch.id, lambda batch: completed(batch) > 10)
        assert client.batches.cancel(batch.id).status == "cancelling"
    batch = until(client, batch.id, has_ended)
    assert (batch.status, batch.errors) == (stop, None)
    answers, errors = read(client, batch.output_file_id), read(client, batch.error_file_id)
    assert len(answers) + len(errors) == 60
    assert {each["error"]["code"] for each in errors} == {f"batch_{stop}"}
    assert "line-0" in {each["custom_id"] for each in errors}
    held = set(held_ids(site))
    assert len(held) == 2
    with Client(site.service.url) as queue:
        assert {queue.status(each).finish_reason for each in held} == {"cancelled"}


def test_a_line_of_several_messages_leaves_nothing_in_redis(site: PoolingSite, client: openai.OpenAI) -> None:
    lines = lines_of([{"model": BI, "input": ["mill"] * 600}])
    batch = until(client, begin(client, lines).id, has_ended)
    [answer] = read(client, batch.output_file_id)
    request_id = answer["response"]["request_id"]
    assert len(answer["response"]["body"]["data"]) == 600
    assert len(answer["response"]["body"]["data"][599]["embedding"]) == SIZE
    for each in (request_id, f"{request_id}.1", f"{request_id}.2"):
        assert site.service.client.exists(stream_key(each))
        assert_forgotten(site, each)


@pytest.mark.parametrize(
    ("url", "body", "code", "told"),
    [
        (EMBEDDINGS, {"model": CROSS, "input": "mill"}, "unsupported", "does not compute embeddings: use /v1/rerank"),
        ("/v1/rerank", {"model": BI, "query": "a", "documents": ["b"]}, "unsupported", "computes embeddings; it does"),
        ("/v1/completions", {"model": BI, "prompt": "a"}, "unsupported", "it does not generate: use /v1/embeddings"),
        (EMBEDDINGS, {"model": "none", "input": "mill"}, "model_not_found", "no worker has registered it"),
        (EMBEDDINGS, {"model": BI, "input": ["mill", ""]}, "invalid_request", "input[1] must not be empty"),
        (EMBEDDINGS, {"model": BI, "input": ["a"] * 2049}, "invalid_request", "2048"),
        (EMBEDDINGS, {"model": BI, "input": "a", "dimensions": 0}, "invalid_request", "dimensions must be at least 1"),
    ],
)
def test_a_wrong_line_fails_the_batch_before_anything_is_sent(
    site: PoolingSite, client: openai.OpenAI, url: str, body: dict[str, Any], code: str, told: str
) -> None:
    before = streams(site)
    good = {"/v1/rerank": {"model": CROSS, "query": "a", "documents": ["b"]}, EMBEDDINGS: {"model": BI, "input": "a"}}
    lines = lines_of([good.get(url, {"model": CHAT, "prompt": "a"}), body], url)
    batch = until(client, begin(client, lines, url).id, has_ended)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data
    [problem] = batch.errors.data
    assert (problem.code, problem.line) == (code, 2)
    assert told in (problem.message or "")
    assert streams(site) <= before


def test_a_batch_with_too_many_inputs_is_refused_with_count_and_limit(site: PoolingSite, client: openai.OpenAI) -> None:
    full = {"model": BI, "input": [[5]] * 2000}
    before = streams(site)
    batch = until(client, begin(client, lines_of([full] * 25 + [{"model": BI, "input": "a"}])).id, has_ended)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data
    [problem] = batch.errors.data
    assert (problem.code, problem.line) == ("too_many_tasks", None)
    assert f"its lines have {MAX_INPUTS + 1} inputs, more than {MAX_INPUTS}" in (problem.message or "")
    assert streams(site) <= before
