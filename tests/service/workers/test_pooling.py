"""Pooling tasks through a real server and real workers, with an engine that computes rows without a model."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from celery import Celery
from rich.console import Console

from headrace_broker import AsyncClient, BrokerSettings, Client, RequestFailedError
from headrace_broker.streams.events import EndEvent, RowsEvent
from headrace_cli.commands.top import draw
from headrace_cli.service_sampler import Sample, report
from service.redis_users import ServerWithUsers, url_of
from service.workers import pooling_engine
from service.workers.service import DEADLINE, QUEUE, Service
from service.workers.worker_process import WorkerProcess

TESTS = Path(__file__).parents[2]
ALL = 10_000


class Site:
    """A server whose workers have the pooling engine."""

    def __init__(self, service: Service, folder: Path) -> None:
        pooling_engine.install(folder)
        self.service = service
        self._folder = folder
        self._rows, self._log = folder / "rows", folder / "computed"
        self.allow(ALL)
        self._log.touch()
        self.client = Client(BrokerSettings(redis_url=service.url), model="tiny")

    def allow(self, rows: int) -> None:
        """Let engines compute so many rows of each message."""
        new = self._folder / "new"
        new.write_text(str(rows))
        new.replace(self._rows)

    def start(self, **settings: object) -> WorkerProcess:
        path = os.pathsep.join(filter(None, [str(self._folder), str(TESTS), os.environ.get("PYTHONPATH", "")]))
        weights = settings.pop("weights", "w1")
        args = {"rows": str(self._rows), "log": str(self._log), "weights": weights}
        engine: dict[str, object] = {"engine": "pooling", "engine_args": json.dumps(args), "device": "auto"}
        return self.service.start_worker(environ={"PYTHONPATH": path}, **engine, **settings)

    def send(self, task: str, kwargs: dict[str, Any], **options: Any) -> Any:
        return self.service._keep(self.service.app.send_task(f"headrace.{task}", kwargs=kwargs, queue=QUEUE, **options))

    def get(self, task: str, kwargs: dict[str, Any], **options: Any) -> dict[str, Any]:
        result: dict[str, Any] = self.send(task, kwargs, **options).get(timeout=DEADLINE)
        return result

    def computed(self, request_id: str) -> list[int]:
        lines = (line.split() for line in self._log.read_text().splitlines())
        return [int(index) for name, index in lines if name == request_id]

    def wait_rows(self, request_id: str, count: int) -> None:
        def has_rows() -> bool:
            newest = self.service.client.xrevrange(f"headrace:stream:{request_id}", count=1)
            return bool(newest) and int(newest[0][0].decode().split("-")[1]) >= count

        self.service.wait_until(has_rows, DEADLINE)


@pytest.fixture(scope="module")
def site(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One worker for the tests that leave it alive, with the rights of deploy/redis/users.acl."""
    folder = tmp_path_factory.mktemp("service")
    with ServerWithUsers(folder) as server:
        service = Service(server, model_folder, folder, url=url_of(server, "admin"))
        made = Site(service, tmp_path_factory.mktemp("pool"))
        try:
            made.start(redis_url=url_of(server, "worker")).wait_ready()
            yield made
        finally:
            made.client.close()
            made.service.close()


@pytest.fixture
def make_site(make_service: Callable[..., Service], tmp_path: Path) -> Callable[[], Site]:
    def make() -> Site:
        folder = tmp_path / "pool"
        folder.mkdir()
        return Site(make_service(), folder)

    return make


def engine_of(worker: WorkerProcess) -> int:
    """Return the process id of the worker's engine."""
    name = pooling_engine.ENGINE.child_module.encode()
    return next(pid for pid in worker.processes() if name in Path(f"/proc/{pid}/cmdline").read_bytes())


def ids(count: int) -> list[list[int]]:
    return [[20 + index % 40, 21, index % 7] for index in range(count)]


def expected(inputs: list[list[int]]) -> list[list[float]]:
    return [[float(sum(each)), float(len(each)), 0.0, 0.0] for each in inputs]


def matrix(result: dict[str, Any]) -> Any:
    """Read the rows as docs/wire.md says for plain Celery."""
    data = result["data"]
    raw = data["bytes"] if isinstance(data["bytes"], bytes) else base64.b64decode(data["bytes"])
    return np.frombuffer(raw, "<f4").reshape(data["shape"])


def test_plain_celery_gets_rows_in_the_order_of_the_inputs(site: Site) -> None:
    inputs = ids(37)
    result = site.get("embed", {"input": inputs})
    assert matrix(result).tolist() == expected(inputs)
    assert (result["error"], result["truncated"]) == (None, [])
    assert result["usage"] == {"prompt_tokens": 111, "cached_tokens": 0, "completion_tokens": 0}
    scores = site.get("score", {"query": "the wheel", "documents": ["a", "of the wheel"]})
    assert scores["data"]["shape"] == [2]
    classes = site.get("classify", {"input": ["the wheel", ["a", "b"]]})
    assert (classes["data"]["shape"], classes["labels"]) == ([2, 4], ["sum", "length", "second", "prompt"])


def test_a_json_message_gets_its_rows_in_base64(site: Site) -> None:
    with Celery("json", broker=site.service.url, backend=site.service.url, set_as_current=False) as app:
        result = app.send_task("headrace.embed", kwargs={"input": ids(3), "dimensions": 2}, queue=QUEUE).get(DEADLINE)
    assert isinstance(result["data"]["bytes"], str)
    assert matrix(result).tolist() == [row[:2] for row in expected(ids(3))]


def test_the_stream_has_an_entry_for_each_step_that_counts_inputs(site: Site) -> None:
    handle = site.send("embed", {"input": ids(10)})
    handle.get(timeout=DEADLINE)
    entries = site.service.client.xrange(f"headrace:stream:{handle.id}")
    assert [entry_id for entry_id, _ in entries] == [b"1-0", b"1-4", b"1-8", b"1-10", b"1-11"]
    chunks = [msgpack.unpackb(fields[b"data"]) for _, fields in entries if fields[b"type"] == b"chunk"]
    assert [(chunk["first"], chunk["count"], len(chunk["bytes"])) for chunk in chunks] == [
        (0, 4, 64), (4, 4, 64), (8, 2, 32)
    ]  # fmt: skip
    assert msgpack.unpackb(entries[0][1][b"data"])["prompt_tokens"] == 30


def test_a_clients_call_is_joined_from_several_messages(site: Site) -> None:
    inputs = ids(600)
    pooled = site.client.embed(inputs, timeout=DEADLINE)
    assert pooled.rows.tolist() == expected(inputs)
    assert (len(pooled.request_ids), pooled.usage.prompt_tokens) == (3, 1800)
    assert [len(site.computed(name)) for name in pooled.request_ids] == [256, 256, 88]
    ranked = site.client.rerank("q", ["a", "the wheel of the wheel", "the wheel"], top_n=2, timeout=DEADLINE)
    assert [found.index for found in ranked] == [1, 2]
    assert ranked[0].score > ranked[1].score
    classes = site.client.classify([("a", "b"), "c"], timeout=DEADLINE)
    assert (classes.rows.shape, classes.labels) == ((2, 4), ["sum", "length", "second", "prompt"])


async def test_an_asyncio_call_gets_the_same(site: Site) -> None:
    async with AsyncClient(BrokerSettings(redis_url=site.service.url), model="tiny") as client:
        pooled = await client.embed(ids(300), timeout=DEADLINE)
        assert pooled.rows.tolist() == expected(ids(300))
        scores = await client.score(["a", "b"], ["c", "d"], timeout=DEADLINE)
        assert scores.rows.shape == (2,)
        assert [found.index for found in await client.rerank("q", ["a", "the wheel"], timeout=DEADLINE)] == [1, 0]
        assert (await client.classify(["a"], timeout=DEADLINE)).rows.shape == (1, 4)


def test_prompts_truncation_and_dimensions_follow_the_model(site: Site) -> None:
    plain = site.client.embed("a wheel turns", timeout=DEADLINE).rows.tolist()[0]
    by_name = site.client.embed("a wheel turns", prompt_name="query", timeout=DEADLINE).rows.tolist()[0]
    by_text = site.client.embed("a wheel turns", prompt="the wheel ", timeout=DEADLINE).rows.tolist()[0]
    assert by_name == by_text
    assert by_name[1] > plain[1]
    assert (plain[3], by_name[3] > 0) == (0.0, True)
    long = [[30] * 70 + [31] * 10, [32]]
    for side, kept in (("end", 30 * 64), ("start", 30 * 54 + 31 * 10)):
        cut = site.client.embed(long, truncate=side, timeout=DEADLINE)
        assert (cut.rows.tolist()[0][:2], cut.truncated) == ([kept, 64.0], [0])
    assert site.client.embed("wheel", dimensions=2, timeout=DEADLINE).rows.shape == (1, 2)


@pytest.mark.parametrize(
    ("task", "kwargs", "code", "sentences"),
    [
        ("embed", {"input": ["a", ""], "top_k": 3, "dimensions": 0}, "invalid_request",
         ["input[1] must not be empty", "unknown key 'top_k'", "dimensions must be at least 1"]),
        ("embed", {"input": [[1], [2, 384]], "truncate": "end"}, "invalid_request",
         ["input[1] must hold token ids of 0 to 383, got 384"]),
        ("embed", {"input": [[1], [2] * 65, [3] * 80]}, "context_length_exceeded",
         ['input[1] has 65 tokens, the model takes 64: send less text, or truncate: "end"', "input[2] has 80 tokens"]),
        ("embed", {"input": "x", "dimensions": 3}, "invalid_request", ["dimensions must be one of 4, 2, got 3"]),
        ("embed", {"input": "x", "dimensions": 5, "prompt_name": "qury", "max_tokens": 65}, "invalid_request",
         ["dimensions must be 1 to 4, got 5", "prompt_name 'qury' is unknown; this model has query",
          "max_tokens must be at most 64, the model's limit, got 65"]),
        ("score", {"queries": ["a", "b"], "documents": ["c"]}, "invalid_request",
         ["queries has 2 entries, documents 1"]),
        ("score", {"query": "the wheel " * 60, "documents": ["c"]}, "context_length_exceeded",
         ["documents[0] has a query that leaves no room for the document in 64 tokens"]),
        ("embed", {"input": "x", "model": "other"}, "model_not_found", ["model 'other' is not served here"]),
        ("generate", {"prompt": "x"}, "unsupported",
         ["model 'tiny' computes embeddings and scores pairs and classifies texts; it does not generate",
          "use the task headrace.embed"]),
        ("embed", {"input": [[5], [pooling_engine.NOT_FINITE]]}, "engine_error", ["input[1] has no finite embedding"]),
    ],
)  # fmt: skip
def test_a_wrong_message_is_refused_with_all_its_problems(
    site: Site, task: str, kwargs: dict[str, Any], code: str, sentences: list[str]
) -> None:
    handle = site.send(task, kwargs)
    error = handle.get(timeout=DEADLINE)["error"]
    assert error["code"] == code
    for sentence in sentences:
        assert sentence in error["message"]
    last = site.service.client.xrevrange(f"headrace:stream:{handle.id}", count=1)[0][1]
    assert msgpack.unpackb(last[b"data"])["error"] == error


def test_a_model_that_generates_refuses_pooling_by_name(service: Service) -> None:
    handle = service._keep(service.app.send_task("headrace.embed", kwargs={"input": "x"}, queue=QUEUE))
    result = handle.get(timeout=DEADLINE)
    assert result["error"] == {
        "code": "unsupported",
        "message": "model 'tiny' generates and answers questions; it does not compute embeddings: use the task "
        "headrace.generate or the task headrace.decide",
    }
    assert (result["data"], result["truncated"]) == (None, [])


def test_after_kill_9_only_the_missing_inputs_are_computed(make_site: Callable[[], Site]) -> None:
    site = make_site()
    site.allow(10)
    first = site.start(lease_seconds=2)
    first.wait_ready()
    inputs = ids(30)
    handle = site.send("embed", {"input": inputs})
    site.wait_rows(handle.id, 10)
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    site.allow(ALL)
    site.start(lease_seconds=2).wait_ready()
    result = handle.get(timeout=DEADLINE)
    assert matrix(result).tolist() == expected(inputs)
    assert Counter(site.computed(handle.id)) == Counter(range(30))
    events = list(site.client.events(handle.id, timeout=DEADLINE))
    rows = [event for event in events if isinstance(event, RowsEvent)]
    assert [(event.attempt, event.first) for event in rows][:4] == [(1, 0), (1, 4), (1, 8), (2, 10)]
    assert isinstance(events[-1], EndEvent)
    site.service.wait_settled()


def test_after_the_engines_death_the_worker_sends_the_missing_inputs_again(make_site: Callable[[], Site]) -> None:
    site = make_site()
    site.allow(6)
    worker = site.start()
    worker.wait_ready()
    inputs = ids(12)
    handle = site.send("embed", {"input": inputs})
    site.wait_rows(handle.id, 6)
    os.kill(engine_of(worker), signal.SIGKILL)
    site.allow(ALL)
    assert matrix(handle.get(timeout=DEADLINE)).tolist() == expected(inputs)
    assert Counter(site.computed(handle.id)) == Counter(range(12))


def test_a_message_that_kills_engines_becomes_a_dead_letter(make_site: Callable[[], Site]) -> None:
    site = make_site()
    site.start().wait_ready()
    handle = site.send("embed", {"input": [[5], [pooling_engine.KILLS]]})
    assert handle.get(timeout=DEADLINE)["error"]["code"] == "dead_letter"
    site.service.wait_until(lambda: len(site.service.dead_letters()) == 1)  # it follows the result


def test_cancel_expiry_revoke_and_abandoning_stop_a_message_between_steps(make_site: Callable[[], Site]) -> None:
    site = make_site()
    site.allow(4)
    site.start().wait_ready()
    cancelled = site.send("embed", {"input": ids(9)})
    site.wait_rows(cancelled.id, 4)
    assert site.client.cancel(cancelled.id)
    expired = site.send("embed", {"input": ids(9)}, expires=3)
    abandoned = site.send("embed", {"input": ids(9)}, headers={"abandon_after": 1})
    revoked = site.send("embed", {"input": ids(9)})
    site.wait_rows(revoked.id, 4)
    site.service.app.control.revoke(revoked.id, terminate=True)
    site.service.wait_until(lambda: revoked.state == "REVOKED")
    assert abandoned.get(timeout=DEADLINE)["error"]["code"] == "cancelled"
    result = expired.get(timeout=DEADLINE)
    assert (result["error"]["code"], result["data"]["shape"]) == ("expired", [4, 4])
    site.allow(ALL)  # the engine sends rows of the cancelled message, whose stream refuses them
    assert cancelled.get(timeout=DEADLINE)["error"]["code"] == "cancelled"
    site.service.wait_settled()


def test_other_weights_do_not_continue_a_message(make_site: Callable[[], Site]) -> None:
    site = make_site()
    site.allow(4)
    first = site.start(lease_seconds=2)
    first.wait_ready()
    handle = site.send("embed", {"input": ids(9)})
    site.wait_rows(handle.id, 4)
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    site.allow(ALL)
    site.start(lease_seconds=2, weights="w2").wait_ready()
    result = handle.get(timeout=DEADLINE)
    assert (result["error"]["code"], result["data"]["shape"]) == ("model_changed", [4, 4])


def test_a_query_does_not_wait_for_a_job_of_2048_texts(make_site: Callable[[], Site]) -> None:
    site = make_site()
    site.allow(4)
    site.start().wait_ready()
    job = site.send("embed", {"input": ids(2048)})
    site.wait_rows(job.id, 4)
    assert matrix(site.get("embed", {"input": ids(1)})).tolist() == expected(ids(1))
    site.allow(ALL)
    assert len(matrix(job.get(timeout=DEADLINE))) == 2048


def test_an_idempotency_key_means_the_same_messages(site: Site) -> None:
    first = site.client.embed(ids(300), idempotency_key="k", timeout=DEADLINE)
    again = site.client.embed(ids(300), idempotency_key="k", timeout=DEADLINE)
    assert again == first
    assert [len(site.computed(name)) for name in first.request_ids] == [256, 44]
    with pytest.raises(Exception, match="was used with another prompt"):
        site.client.classify(ids(300), idempotency_key="k", timeout=DEADLINE)


def test_metrics_and_top_count_inputs_and_say_nothing_of_generated_tokens(make_site: Callable[[], Site]) -> None:
    site = make_site()
    worker = site.start().wait_ready()
    site.client.embed([[5], [6] * 70, [7] * 80], truncate="end", timeout=DEADLINE)
    site.client.classify(["a"], timeout=DEADLINE)
    site.allow(4)
    handle = site.send("embed", {"input": ids(9)})
    site.wait_rows(handle.id, 4)
    found = worker.metrics()
    counted = {name: found[f'headrace_pooled_inputs_total{{task="{name}"}}'] for name in ("embed", "score", "classify")}
    assert counted == {"embed": 7, "score": 0, "classify": 1}
    assert found["headrace_truncated_inputs_total"] == 2
    assert found['headrace_prompt_tokens_total{source="computed"}'] > 128
    of_generations = ("first_token", "inter_token", "generation", "decode", "output_token", "draws", "kv_", "prefix_")
    assert [name for name in found if any(word in name for word in of_generations)] == []
    stats = site.service.inspected("engine_stats")
    assert (stats["pools"], stats["totals"]["inputs"], stats["totals"]["tokens"]) == (True, 8, 0)
    [slowest] = stats["slowest_requests"]
    assert slowest["inputs"] == 4
    assert "tokens" not in slowest
    table = io.StringIO()
    sample = Sample(2.0, {}, {"w": stats})
    earlier = {**stats, "totals": {**stats["totals"], "inputs": 2}}
    Console(file=table, width=140).print(draw(report(sample, Sample(0.0, {}, {"w": earlier}))))
    assert "4 inputs" in table.getvalue()
    assert "3.0" in table.getvalue(), "6 inputs in 2 seconds"
    status = site.client.status(handle.id)
    assert (status.state, status.rows, status.tokens) == ("running", 4, 0)


def test_a_failed_message_fails_the_call(site: Site) -> None:
    with pytest.raises(RequestFailedError, match="no finite embedding"):
        site.client.embed([[5], [pooling_engine.NOT_FINITE]], timeout=DEADLINE)
