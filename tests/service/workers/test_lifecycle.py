"""Starts, drains and crashes of a worker and its engine."""

import base64
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

from headrace_broker.client.client import Client
from service.workers.service import DEADLINE, Service, StreamLog, assert_result_is_stream, results

NUM_TOKENS = 400
LONG = 800
"""More tokens than a worker generates before it gets a signal."""
TOKENS = "headrace_generation_tokens_total"


def send_all(service: Service, count: int = 6, num_tokens: int = NUM_TOKENS) -> list[Any]:
    return [service.generate(f"the wheel {number}", max_tokens=num_tokens) for number in range(count)]


def undisturbed(service: Service, count: int = 6, num_tokens: int = NUM_TOKENS) -> list[dict[int, Any]]:
    handles = send_all(service, count, num_tokens)
    results(handles)
    return [service.stream(handle.id).content for handle in handles]


def content(service: Service, handles: list[Any]) -> list[dict[int, Any]]:
    logs: dict[str, StreamLog] = service.wait_ended([handle.id for handle in handles])
    for request_id, result in results(handles).items():
        assert_result_is_stream(result, logs[request_id])
    return [logs[handle.id].content for handle in handles]


def test_sigterm_lets_running_requests_finish_and_leaves_later_ones_queued(
    make_service: Callable[..., Service],
) -> None:
    service = make_service()
    worker = service.start_worker().wait_ready()
    handles = send_all(service)
    service.wait_tokens([handle.id for handle in handles], at_least=3)
    worker.send_signal(signal.SIGTERM)
    worker.wait_for_log("drain began")
    assert worker.wait() == 0
    worker.assert_nothing_left()
    began, finished = (line for line in worker.log_lines() if line["event"].startswith("drain "))
    assert (began["reason"], began["running"] + began["unprepared"]) == ("warm shutdown", len(handles))
    assert (finished["event"], finished["ended"], finished["requeued"]) == ("drain finished", len(handles), 0)
    assert all(line.startswith("{") for line in worker.log_text().splitlines()), worker.log_text()
    late = service.generate()
    assert all(result["usage"]["completion_tokens"] == NUM_TOKENS for result in results(handles).values())
    assert service.queued() == 1
    assert service.stream(late.id).attempts == []


@pytest.mark.parametrize(("number", "settings"), [(signal.SIGTERM, {"grace_seconds": 0}), (signal.SIGQUIT, {})])
def test_requests_that_a_stopped_worker_requeues_resume_at_the_next_token(
    make_service: Callable[..., Service], number: signal.Signals, settings: dict[str, object]
) -> None:
    service = make_service()
    first = service.start_worker(lease_seconds=60, **settings).wait_ready()
    expected = undisturbed(service, 3, LONG)
    handles = send_all(service, 3, LONG)
    service.wait_tokens([handle.id for handle in handles], at_least=3)
    first.send_signal(number)
    first.wait()
    first.assert_nothing_left()
    assert service.leased() == 0
    assert service.queued() == len(handles)
    service.start_worker()
    assert content(service, handles) == expected
    assert any(service.stream(handle.id).attempts == [1, 2] for handle in handles)


def test_a_killed_engine_is_replaced_and_its_requests_continue_in_the_same_attempt(
    make_service: Callable[..., Service],
) -> None:
    service = make_service()
    worker = service.start_worker().wait_ready()
    expected = undisturbed(service)
    handles = send_all(service)
    service.wait_tokens([handle.id for handle in handles], at_least=3)
    pid = worker.engine_pid()
    os.kill(pid, signal.SIGKILL)
    assert content(service, handles) == expected
    assert all(service.stream(handle.id).attempts == [1] for handle in handles)
    assert worker.engine_pid() != pid
    metrics = worker.metrics()
    assert metrics['headrace_engine_restarts_total{reason="crash"}'] == 1
    assert metrics["headrace_requests_in_flight"] == 0


def test_the_engine_continues_while_redis_is_away_and_its_chunks_are_written_afterwards(
    make_service: Callable[..., Service],
) -> None:
    service = make_service(appendonly=True)
    worker = service.start_worker(lease_seconds=300).wait_ready()
    expected = undisturbed(service)
    handles = send_all(service)
    service.wait_tokens([handle.id for handle in handles], at_least=3)
    service.server.kill()
    # until all tokens of the requests are in the worker's memory, the most that it can hold
    service.wait_until(lambda: worker.metrics().get(TOKENS) == 2 * len(handles) * NUM_TOKENS, timeout=DEADLINE)
    service.server.start()
    assert content(service, handles) == expected
    assert all(service.stream(handle.id).attempts == [1] for handle in handles)
    service.wait_settled()


def test_two_workers_on_one_queue_share_its_requests(make_service: Callable[..., Service]) -> None:
    service = make_service()
    workers = [service.start_worker(max_num_seqs=2).wait_ready() for _ in range(2)]
    handles = send_all(service, 12)
    results(handles)
    served = [worker.metrics()['headrace_requests_total{outcome="length"}'] for worker in workers]
    assert sum(served) == 12
    assert min(served) > 0
    service.wait_settled()


def test_one_worker_serves_several_queues_of_its_model_its_own_first_at_each_priority(
    make_service: Callable[..., Service],
) -> None:
    service = make_service()
    params = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}

    def send(queue: str, priority: int) -> Any:
        kwargs = {"prompt": "x", "model": queue, "sampling_params": params}
        sent = service.app.send_task("headrace.generate", kwargs=kwargs, queue=f"headrace.{queue}", priority=priority)
        return service.handle(sent.id)

    late = [send(queue, 9) for queue in ("bulk", "tiny")]
    urgent = [send(queue, 0) for queue in ("bulk", "bulk", "tiny", "tiny")]
    service.start_worker(queues="bulk", max_num_seqs=1).wait_ready()
    answers = results([*late, *urgent])
    assert all(answer["error"] is None for answer in answers.values())
    bulk_late, tiny_late = late
    bulk_1, bulk_2, tiny_1, tiny_2 = urgent
    in_order = sorted([*late, *urgent], key=lambda handle: handle.date_done)
    assert in_order == [tiny_1, tiny_2, bulk_1, bulk_2, tiny_late, bulk_late]
    with Client(service.server.url, model="bulk") as client:
        assert set(client.models()) == {"tiny", "bulk"}
        assert client.result(client.submit("x", params), timeout=60).usage is not None


def test_a_worker_is_ready_only_once_its_model_is_loaded(make_service: Callable[..., Service]) -> None:
    service = make_service()
    worker = service.start_worker()
    engine = worker.engine_pid()
    os.kill(engine, signal.SIGSTOP)  # it loads no further
    status, body = worker.health("ready")
    assert status == 503
    assert "loading" in body
    assert worker.health("live")[0] == 200
    with Client(service.server.url) as client:
        service.wait_until(lambda: set(client.loading_models()) == {"tiny"})
        assert client.models() == {}
        os.kill(engine, signal.SIGCONT)
        worker.wait_ready()
        assert client.loading_models() == {}
        assert set(client.models()) == {"tiny"}


def test_celerys_own_command_runs_the_worker_from_the_environment(make_service: Callable[..., Service]) -> None:
    service = make_service()
    command = [sys.executable, "-m", "celery", "-A", "headrace_workers.app", "worker"]
    service.start_worker(command=command).wait_ready()
    assert service.generate().get(timeout=60)["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"model": "/no/such/model"}, r"model '/no/such/model' cannot be read"),
        ({"max_num_seqs": "many"}, r"HEADRACE_MAX_NUM_SEQS .*got 'many'"),
        ({"dtype": "int3"}, r"dtype must be one of .*, got 'int3'"),
        ({"redis_url": "http://localhost"}, r"redis_url must look like"),
        ({"kv_cache_memory": "1KiB"}, r"give more KV memory or lower max_model_len"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_worker_that_cannot_start_says_why_and_exits(
    make_service: Callable[..., Service], settings: dict[str, object], sentence: str
) -> None:
    worker = make_service().start_worker(**settings)
    assert worker.wait(timeout=60) != 0
    assert re.search(sentence, worker.log_text()), worker.log_text()
    worker.assert_nothing_left()


def test_no_prompt_and_no_output_is_in_log_metrics_or_events(make_service: Callable[..., Service]) -> None:
    service = make_service()
    worker = service.start_worker(log_level="DEBUG").wait_ready()
    secret = "the wheel Zanzibar"
    with service.client.pubsub() as pubsub:
        pubsub.psubscribe("/0.celeryev/*")
        assert pubsub.get_message(timeout=10)["type"] == "psubscribe"
        result = service.generate(secret, max_tokens=40).get(timeout=60)
        events = b""
        while b"task-succeeded" not in events:
            message = pubsub.get_message(timeout=10)
            assert message is not None, f"no task-succeeded among the events: {events!r}"
            events += base64.b64decode(json.loads(message["data"])["body"])
    text = result["outputs"][0]["text"]
    assert len(text) > 10
    for place in (worker.log_text(), str(worker.metrics()), events.decode(errors="replace")):
        assert "Zanzibar" not in place
        assert text[:12] not in place
