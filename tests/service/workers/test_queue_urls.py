"""Models whose queues are on servers of their own, by HEADRACE_QUEUE_URLS."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery
from click.testing import CliRunner

from headrace_broker.client.client import Client
from headrace_broker.queue.leases import Leases
from headrace_broker.queue.unread_lists import gather_steps
from headrace_broker.queue.worker_leases import WorkerLeases
from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.server.queue_servers import QueueServers
from headrace_broker.settings import BrokerSettings
from headrace_cli.commands.dead import dead_letters
from headrace_cli.commands.queue import queue
from headrace_cli.exporter import Exporter
from headrace_monitoring.health import WorkerHealth
from headrace_monitoring.metrics import Metrics
from headrace_workers.celery.bootsteps import EngineStep
from headrace_workers.celery.queue_gauges import QueueGauges
from service.servers import make_server
from service.workers.service import DEADLINE, Service

PARAMS = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture
def second() -> Iterator[EmbeddedServer]:
    with make_server(appendonly=True) as server:
        yield server


def of_queues(client: "redis.Redis") -> set[str]:
    """Return the queues that have keys on this server."""
    keys = [key.decode() for pattern in ("lease", "queue", "dead") for key in client.keys(f"headrace:{pattern}:*")]
    return {name for name in ("headrace.tiny", "headrace.code") if any(name in key for key in keys)}


def test_two_models_are_served_by_two_servers(
    make_service: Callable[..., Service], second: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make_service()
    urls = f"code={second.url}"
    for name in ("tiny", "code"):
        service.start_worker(served_model_name=name, queue_urls=urls)
    for worker in service.workers:
        worker.wait_ready()
    settings = BrokerSettings(service.url, queue_urls=urls)
    with Client(settings) as client, connect(second.url) as other:
        ids = client.submit_many(
            [
                {"prompt": f"the wheel {number}", "sampling_params": PARAMS, "model": name}
                for number in range(8)
                for name in ("tiny", "code")
            ]
        )
        tokens = [client.result(request_id, timeout=DEADLINE).usage.completion_tokens for request_id in ids]
        assert tokens == [8] * 16
        assert [len([*client.stream(request_id, timeout=DEADLINE)]) > 0 for request_id in ids] == [True] * 16
        assert (of_queues(service.client), of_queues(other)) == ({"headrace.tiny"}, {"headrace.code"})
        assert other.keys("headrace:stream:*") == other.keys("celery-task-meta-*") == []

        app = Celery("plain", broker=second.url, backend=service.url, set_as_current=False)
        app.conf.update(task_serializer="msgpack", result_serializer="msgpack", accept_content=["msgpack"])
        job = {"prompt": "the wheel", "sampling_params": PARAMS}
        sent = app.send_task("headrace.generate", kwargs=job, queue="headrace.code")
        assert sent.get(timeout=DEADLINE)["usage"]["completion_tokens"] == 8

        app.send_task("headrace.unknown", task_id="unknown", queue="headrace.code")
        service.wait_until(lambda: len(client.dead_letters()) == 1)
        service.wait_until(lambda: client.status("unknown").state == "finished")
        monkeypatch.setenv("HEADRACE_QUEUE_URLS", urls)
        listed = CliRunner().invoke(dead_letters, ["list", "--model", "code", "--json", "--redis-url", service.url])
        assert [letter["request_id"] for letter in json.loads(listed.output)] == ["unknown"]
        requeued = CliRunner().invoke(dead_letters, ["requeue", "--all", "--redis-url", service.url])
        assert requeued.output == "1 requeued\n"
        service.wait_until(lambda: [letter.request_id for letter in client.dead_letters()] == ["unknown"])
        shown = CliRunner().invoke(queue, ["list", "--json", "--redis-url", service.url])
        assert {one["model"]: one["dead"] for one in json.loads(shown.output)} == {"tiny": 0, "code": 1}
        with QueueServers(service.client, settings.url_by_queue) as servers:
            exporter = Exporter(service.client, port=0, servers=servers)
            exporter.poll()
            text = exporter.exposition.exposition().decode()
            assert 'headrace_queue_messages{model="code",queue="headrace.code",state="dead"} 1.0' in text

    with Client(settings, model="code") as client:
        for worker in service.workers:
            worker.send_signal(signal.SIGTERM)
            worker.wait()
        waiting = client.submit("the wheel", PARAMS)
        assert client.is_known(waiting)
        assert client.purge_queue().waiting == 1
        assert client.status(waiting).finish_reason == "cancelled"


def test_a_worker_serves_one_server_while_another_is_away(
    make_service: Callable[..., Service], second: EmbeddedServer
) -> None:
    service = make_service()
    urls = f"code={second.url}"
    worker = service.start_worker(queues="code", queue_urls=urls, lease_seconds=3)
    worker.wait_ready()
    with Client(BrokerSettings(service.url, queue_urls=urls), model="code") as client:
        running = client.submit("the wheel", {**PARAMS, "max_tokens": 1500})
        service.wait_tokens([running], 1)
        later = client.submit("the mill", PARAMS, priority=9)
        second.kill()
        assert service.generate().get(timeout=DEADLINE)["usage"]["completion_tokens"] == 8
        assert client.result(running, timeout=DEADLINE).usage.completion_tokens == 1500
        second.start()
        assert client.result(later, timeout=DEADLINE).usage.completion_tokens == 8
        after = client.submit("the mill", PARAMS)
        assert client.result(after, timeout=DEADLINE).usage.completion_tokens == 8
        with connect(second.url) as other:
            service.wait_until(lambda: other.keys("headrace:lease:*") == [])
    service.wait_settled()
    assert len(service.stream(running).attempts) == 1


def test_a_worker_serves_one_server_while_another_hangs(
    make_service: Callable[..., Service], second: EmbeddedServer
) -> None:
    service = make_service()
    urls = f"code={second.url}"
    worker = service.start_worker(queues="code", queue_urls=urls, lease_seconds=8, max_num_seqs=8)
    worker.wait_ready()
    with Client(BrokerSettings(service.url, queue_urls=urls), model="code") as client:
        running = [client.submit("the wheel", {**PARAMS, "max_tokens": 300}) for _ in range(6)]
        service.wait_tokens(running, 1)
        os.kill(second.pid or 0, signal.SIGSTOP)
        try:
            held = service.generate(max_tokens=1500)
            usages = [client.result(request_id, timeout=DEADLINE).usage for request_id in running]
            assert [usage.completion_tokens for usage in usages] == [300] * 6
            assert held.get(timeout=DEADLINE)["usage"]["completion_tokens"] == 1500
            service.wait_until(lambda: f"headrace.code on 127.0.0.1:{second.port}: " in worker.log_text())
        finally:
            os.kill(second.pid or 0, signal.SIGCONT)
        after = client.submit("the mill", PARAMS)
        assert client.result(after, timeout=DEADLINE).usage.completion_tokens == 8
        with connect(second.url) as other:
            service.wait_until(lambda: other.keys("headrace:lease:*") == [])
    service.wait_settled()
    assert len(service.stream(held.id).attempts) == 1


def test_the_gauges_of_a_queue_do_not_need_the_servers_of_other_queues(
    second: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    redis_client.lpush("headrace.tiny", "{}", "{}")
    with QueueServers(redis_client, {"headrace.code": second.url}, timeout=0.1) as servers:
        main, other = (
            Leases(servers.of(name), lease_seconds=15, delivery_limit=5) for name in ("headrace.tiny", "headrace.code")
        )
        other.serve("headrace.code")
        metrics, health = Metrics(model="tiny", queue="headrace.tiny", version="1"), WorkerHealth()
        health.state("ready")
        gauges = QueueGauges(servers.of, ["headrace.code", "headrace.tiny"], metrics, health)
        gauges.attach(WorkerLeases(main, {"headrace.code": other}))
        os.kill(second.pid or 0, signal.SIGSTOP)
        try:
            for _ in range(2):  # the second time the server is left alone
                gauges.poll()
                text = metrics.exposition().decode()
                assert 'headrace_redis_up{model="tiny"} 1.0' in text
                assert 'state="ready"} 2.0' in text
                assert f"headrace.code on 127.0.0.1:{second.port}: " in str(health.not_ready())
            errors = 'headrace_redis_errors_total{command="depth",model="tiny"} 1.0'
            assert errors in text
        finally:
            os.kill(second.pid or 0, signal.SIGCONT)


def test_further_priority_steps_of_a_queue_are_gathered_while_the_server_of_another_hangs(
    second: EmbeddedServer, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["headrace.code", "headrace.tiny"]
    redis_client.lpush("headrace.tiny\x06\x161", "{}")
    with QueueServers(redis_client, {"headrace.code": second.url}, timeout=0.1) as servers:
        other, main = (Leases(servers.of(name), lease_seconds=15, delivery_limit=5) for name in names)
        leases = WorkerLeases(main, {"headrace.code": other})
        monkeypatch.setattr(WorkerLeases, "reaped", names)
        step: Any = SimpleNamespace(_leases=leases, servers=servers, client=redis_client, _reported=set())
        os.kill(second.pid or 0, signal.SIGSTOP)
        try:
            EngineStep._for_each_reaped(step, lambda queue, server: gather_steps(server, [queue]))
        finally:
            os.kill(second.pid or 0, signal.SIGCONT)
        assert leases.away("headrace.code")
        assert redis_client.llen("headrace.tiny") == 1


def test_a_worker_reports_messages_of_its_queue_on_the_wrong_server(
    make_service: Callable[..., Service], second: EmbeddedServer
) -> None:
    service = make_service()
    worker = service.start_worker(queues="code", queue_urls=f"code={second.url}")
    worker.wait_ready()
    with Client(service.url, model="code") as client:  # without HEADRACE_QUEUE_URLS
        client.submit("the wheel", PARAMS, request_id="lost")
    worker.wait_for_log(
        r"'headrace.code', which has 1 message\(s\) of queue headrace.code: its producers send to the main"
    )


def test_the_second_of_two_messages_with_one_id_in_two_queues_becomes_a_dead_letter(
    make_service: Callable[..., Service],
) -> None:
    service = make_service()
    for name in ("tiny", "code"):
        service.start_worker(served_model_name=name)
    for worker in service.workers:
        worker.wait_ready()
    app = Celery("plain", broker=service.url, set_as_current=False)
    job = {"prompt": "the wheel", "sampling_params": {**PARAMS, "max_tokens": 1000}}
    with Client(service.url) as client:
        app.send_task("headrace.generate", kwargs=job, queue="headrace.tiny", task_id="r")
        service.wait_tokens(["r"], 1)
        app.send_task("headrace.generate", kwargs=job, queue="headrace.code", task_id="r")
        service.wait_until(lambda: [letter.reason for letter in client.dead_letters()] == ["duplicate id"])
        assert client.result("r", timeout=DEADLINE).usage.completion_tokens == 1000
    assert len(service.stream("r").attempts) == 1
