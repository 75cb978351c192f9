"""The stand-alone exporter against a real server, without a worker."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from headrace_broker.client.client import Client
from headrace_broker.keys import queue_lists, queue_name, usage_key
from headrace_broker.models.registry import register_model
from headrace_broker.packing import pack
from headrace_broker.queue.leases import Leases
from headrace_broker.results import Usage
from headrace_broker.server.connections import address_of, connect
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.server.queue_servers import QueueServers
from headrace_broker.usage.entry import UsageEntry
from headrace_broker.usage.ledger import DAY
from headrace_cli.exporter import MAX_MODELS, Exporter
from headrace_cli.usage_sampler import INTERVAL_SECONDS, UsageSampler
from headrace_monitoring.exposition import ExpositionFormat
from headrace_wire.codes import DeadLetterReason
from service.servers import make_server
from unit.monitoring.scrape import calls_by_the_standard_writer


@pytest.fixture
def exporter(redis_client: "redis.Redis") -> Exporter:
    return Exporter(redis_client, port=0)


def value(exporter: Exporter, name: str, **labels: str) -> float:
    values = [
        sample.value
        for family in text_string_to_metric_families(exporter.exposition.exposition().decode())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(values) == 1, f"{len(values)} samples match {name} {labels}"
    return values[0]


def names(exporter: Exporter) -> set[str]:
    return {family.name for family in text_string_to_metric_families(exporter.exposition.exposition().decode())}


def test_the_queues_of_every_registered_model_are_exported_without_a_worker(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", exporter: Exporter
) -> None:
    register_model(redis_client, "one", max_model_len=100, worker="gone", seen=1234.0)
    with Client(redis_server.url, check_model=False) as client:
        client.submit_many([{"prompt": "a", "model": "one", "priority": 4}] * 3)
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=3)
    (message,) = leases.fetch(queue_lists(queue_name("one")), 1)
    leases.hold(message.lease_id, message)
    leases.dead_letter(message.lease_id, DeadLetterReason.POISON)
    leases.fetch(queue_lists(queue_name("one")), 1)
    exporter.poll()
    queue = {"model": "one", "queue": "headrace.one"}
    assert value(exporter, "headrace_queue_messages", state="ready", **queue) == 1
    assert value(exporter, "headrace_queue_messages", state="unacked", **queue) == 1
    assert value(exporter, "headrace_queue_messages", state="dead", **queue) == 1
    assert value(exporter, "headrace_queue_ready_messages", priority="3", **queue) == 1
    assert value(exporter, "headrace_queue_dead_letters", reason="poison", **queue) == 1
    assert value(exporter, "headrace_queue_run_out_leases", **queue) == 0
    assert 0 < value(exporter, "headrace_queue_oldest_message_age_seconds", **queue) < 60
    assert value(exporter, "headrace_model_last_seen_timestamp_seconds", model="one") == 1234
    assert value(exporter, "headrace_exporter_redis_up") == 1
    assert value(exporter, "headrace_redis_memory_used_bytes") > 0
    assert value(exporter, "headrace_redis_persistence_ok") == 1


def test_the_tokens_of_a_queue_are_exported_once_a_request_has_ended(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    exporter = Exporter(redis_client, models=["empty"], port=0)
    register_model(redis_client, "one", max_model_len=100, worker="gone", seen=1234.0)
    with Client(redis_server.url, check_model=False) as client:
        client.submit_many([{"prompt": "a", "model": "one"}] * 4)
    exporter.poll()
    assert value(exporter, "headrace_worker_tokens_per_second", model="one") == 0
    assert value(exporter, "headrace_outstanding_worker_seconds", model="empty") == 0
    assert b'headrace_outstanding_tokens{model="one"' not in exporter.exposition.exposition()
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=3)
    ended, _leased = leases.fetch(queue_lists(queue_name("one")), 2)
    leases.hold(ended.lease_id, ended)
    leases.cost(ended.lease_id, 150)
    leases.ack(ended.lease_id)
    exporter.poll()
    queue = {"model": "one", "queue": "headrace.one"}
    assert value(exporter, "headrace_outstanding_tokens", state="waiting", **queue) == 300
    assert value(exporter, "headrace_outstanding_tokens", state="leased", **queue) == 150
    assert b'headrace_outstanding_worker_seconds{model="one"' not in exporter.exposition.exposition()
    register_model(redis_client, "one", max_model_len=100, worker="gone", seen=1234.0, tokens_per_second=50.0)
    exporter.poll()
    assert value(exporter, "headrace_outstanding_worker_seconds", **queue) == 9
    assert value(exporter, "headrace_worker_tokens_per_second", model="one") == 50


def test_the_usage_of_the_day_is_exported_by_model(redis_server: EmbeddedServer, redis_client: "redis.Redis") -> None:
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=3, usage_days=1)
    exporter = Exporter(redis_client, models=["one", "unused"], port=0)
    with Client(redis_server.url, check_model=False) as client:
        client.submit_many([{"prompt": "a", "model": "one"}] * 2)
    for message, usage in zip(
        leases.fetch(queue_lists(queue_name("one")), 2), (Usage(10, 4, 3), Usage(5, 0, 1)), strict=True
    ):
        leases.hold(message.lease_id, message)
        leases.cost(message.lease_id, 13, UsageEntry("completions", "", usage))
        leases.ack(message.lease_id)
    exporter.poll()
    assert value(exporter, "headrace_usage_requests_total", model="one", queue="headrace.one") == 2
    assert value(exporter, "headrace_usage_requests_total", model="unused") == 0
    used = {"prompt": 15, "cached": 4, "generated": 4}
    tokens = {kind: value(exporter, "headrace_usage_tokens_total", model="one", kind=kind) for kind in used}
    assert tokens == used


def test_the_usage_is_read_again_after_a_while_and_on_a_new_day(redis_client: "redis.Redis") -> None:
    now = 10 * DAY + 100.0
    sampler = UsageSampler(clock=lambda: now)

    def count(hour: int) -> None:
        redis_client.hset(usage_key(hour), pack(["", "", "headrace.one", "completions", 3]), pack([1] * 6))

    assert sampler.read(redis_client) == {}
    count(10 * DAY)
    assert sampler.read(redis_client) == {}
    now += INTERVAL_SECONDS
    assert sampler.read(redis_client)["one"].requests == 1
    now = 11 * DAY - 1.0
    assert sampler.read(redis_client)["one"].requests == 1
    now = 11 * DAY + 1.0
    assert sampler.read(redis_client) == {}


def test_the_time_until_the_earliest_deadline_is_exported_if_a_waiting_message_has_one(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    exporter = Exporter(redis_client, models=["one"], port=0)
    queue = {"model": "one", "queue": "headrace.one"}
    with Client(redis_server.url, check_model=False) as client:
        client.submit("a", model="one")
        exporter.poll()
        assert b"headrace_earliest_slack_seconds{" not in exporter.exposition.exposition()
        client.submit("b", model="one", expires=7200)
    Leases(redis_client, lease_seconds=60, delivery_limit=3).fetch(queue_lists(queue_name("one")), 1)
    exporter.poll()
    assert 7000 < value(exporter, "headrace_earliest_slack_seconds", **queue) <= 7200


def test_a_server_that_may_evict_keys_is_logged_once_and_exported(caplog: pytest.LogCaptureFixture) -> None:
    with make_server() as server, connect(server.url) as client:
        exporter = Exporter(client, port=0)
        exporter.poll()
        assert value(exporter, "headrace_redis_may_evict") == 0
        assert "maxmemory-policy" not in caplog.text
        client.config_set("maxmemory-policy", "volatile-lru")
        exporter.poll()
        exporter.poll()
        assert value(exporter, "headrace_redis_may_evict") == 1
        assert caplog.text.count("Redis has maxmemory-policy volatile-lru") == 1
        assert "set it to noeviction" in caplog.text


def test_messages_in_lists_that_no_worker_reads_are_counted_and_logged(
    redis_client: "redis.Redis", caplog: pytest.LogCaptureFixture
) -> None:
    register_model(redis_client, "one", max_model_len=100, worker="gone", seen=1234.0)
    lists = ("headrace.one:3", "headrace.one:9", "team:headrace.one", "team:headrace.one\x06\x163")
    for key in (*lists, "headrace.one:3", "headrace.one", "headrace.one\x06\x163"):
        redis_client.lpush(key, "{}")
    exporter = Exporter(redis_client, port=0)
    exporter.poll()
    exporter.poll()
    assert value(exporter, "headrace_queue_unread_messages", model="one", queue="headrace.one") == 5
    assert caplog.text.count("no worker reads the list") == 4
    assert "'team:headrace.one\\x06\\x163'" in caplog.text


def test_messages_on_the_main_server_for_a_queue_of_another_server_are_counted_and_logged(
    redis_client: "redis.Redis", caplog: pytest.LogCaptureFixture
) -> None:
    register_model(redis_client, "one", max_model_len=100, worker="gone", seen=1234.0)
    redis_client.lpush("headrace.one", "{}", "{}")
    redis_client.lpush("headrace.one\x06\x163", "{}")
    redis_client.lpush("headrace:queue:wake-up:headrace.one", "1")
    with make_server() as second, QueueServers(redis_client, {"headrace.one": second.url}) as servers:
        exporter = Exporter(redis_client, port=0, servers=servers)
        exporter.poll()
        exporter.poll()
        assert value(exporter, "headrace_queue_unread_messages", model="one", queue="headrace.one") == 3
    assert caplog.text.count("no worker reads the list") == 2
    assert "no worker reads the list 'headrace.one': its producers send to the main server" in caplog.text


def test_the_lists_of_a_hostile_producer_are_bounded(
    redis_client: "redis.Redis", caplog: pytest.LogCaptureFixture
) -> None:
    register_model(redis_client, "one", max_model_len=100, worker="gone", seen=1234.0)
    for number in range(150):
        redis_client.lpush(f"{number}:headrace.one", "{}")
    exporter = Exporter(redis_client, port=0)
    exporter.poll()
    assert value(exporter, "headrace_queue_unread_messages", model="one", queue="headrace.one") == 100
    assert caplog.text.count("no worker reads the list") == 100


def test_an_exporter_that_may_not_search_counts_the_lists_that_it_may_read() -> None:
    with make_server() as server, connect(server.url) as client:
        client.acl_setuser("default", commands=["-scan"])
        register_model(client, "one", max_model_len=100, worker="gone", seen=1234.0)
        client.lpush("headrace.one:3", "{}")
        exporter = Exporter(client, port=0)
        exporter.poll()
        exporter.poll()
        assert value(exporter, "headrace_queue_unread_messages", model="one", queue="headrace.one") == 1
        assert value(exporter, "headrace_exporter_redis_up") == 1
        assert len(client.acl_log()) == 1


def test_a_model_that_no_worker_has_served_yet_can_be_given(redis_client: "redis.Redis") -> None:
    exporter = Exporter(redis_client, models=["new"], port=0)
    exporter.poll()
    assert value(exporter, "headrace_queue_messages", model="new", state="ready") == 0
    assert value(exporter, "headrace_model_last_seen_timestamp_seconds", model="new") == 0


def test_each_server_is_exported_and_those_of_queues_may_be_away(
    redis_client: "redis.Redis", caplog: pytest.LogCaptureFixture
) -> None:
    main, up = address_of(redis_client), "headrace_exporter_redis_up"
    with make_server() as second, QueueServers(redis_client, {"headrace.one": second.url}) as servers:
        other = address_of(servers.of("headrace.one"))
        exporter = Exporter(redis_client, models=["one", "two"], port=0, servers=servers)
        exporter.poll()
        assert value(exporter, up, server=main) == value(exporter, up, server=other) == 1
        assert value(exporter, "headrace_redis_persistence_ok", server=other) == 1
        second.kill()
        exporter.poll()
        exporter.poll()
        assert value(exporter, up, server=main) == 1
        assert value(exporter, up, server=other) == 0
        assert value(exporter, "headrace_redis_memory_used_bytes") > 0, "only the main server is left"
        assert value(exporter, "headrace_queue_messages", state="ready") == 0, "only the queue of 'two' is left"
        assert caplog.text.count(f"{other}, with the queues headrace.one, cannot be read") == 1
        second.start()
        exporter.poll()
        assert value(exporter, up, server=other) == 1
        assert value(exporter, "headrace_queue_messages", model="one", state="ready") == 0


def test_no_levels_are_exported_while_redis_is_unavailable() -> None:
    with make_server() as server, connect(server.url) as client:
        exporter = Exporter(client, models=["one"], port=0)
        exporter.poll()
        assert value(exporter, "headrace_exporter_redis_up") == 1
        server.kill()
        exporter.poll()
        assert value(exporter, "headrace_exporter_redis_up") == 0
        assert value(exporter, "headrace_exporter_poll_failures_total") == 1
        assert not {"headrace_queue_messages", "headrace_redis_memory_used_bytes"} & names(exporter)
        server.start()
        exporter.poll()
        assert value(exporter, "headrace_exporter_redis_up") == 1
        assert value(exporter, "headrace_queue_messages", model="one", state="ready") == 0


def test_a_scrape_of_ten_models_makes_under_half_the_calls_of_the_standard_writer(redis_client: "redis.Redis") -> None:
    exporter = Exporter(redis_client, models=[f"model-{number}" for number in range(10)], port=0)
    exporter.poll()
    assert calls_by_the_standard_writer(exporter.exposition, ExpositionFormat.TEXT) < 0.5


def test_the_number_of_series_is_bounded_for_any_number_of_registered_models(
    redis_client: "redis.Redis", exporter: Exporter
) -> None:
    for number in range(MAX_MODELS + 5):
        register_model(redis_client, f"model-{number}", max_model_len=1, worker="w", seen=float(number))
    exporter.poll()
    assert value(exporter, "headrace_exporter_models_left_out") == 5
    assert value(exporter, "headrace_queue_messages", model=f"model-{MAX_MODELS + 4}", state="ready") == 0
    text = exporter.exposition.exposition().decode()
    assert 'model="model-4"' not in text  # the models last seen longest ago are left out
    # 3 states, 4 priorities, 10 reasons, age, run out, unread, last seen, blocked, tokens of 2 states,
    # tokens a second, seconds of work, used requests and 3 kinds of used tokens: what docs/monitoring.md states
    assert sum('model="' in line for line in text.splitlines()) == 30 * MAX_MODELS


def test_an_exporter_with_a_wrong_password_is_not_ready_and_says_so(redis_server: EmbeddedServer) -> None:
    with connect(redis_server.url.replace("//", "//exporter:wrong@")) as client:
        exporter = Exporter(client, port=0)
        with exporter.server:
            exporter.poll()
            with pytest.raises(urllib.error.HTTPError, match="503") as refused:
                urllib.request.urlopen(f"{exporter.server.url}/health/ready", timeout=60)
            assert b"Redis could not be read: invalid username-password pair" in refused.value.read()


def test_the_command_serves_polls_and_ends_on_sigterm(redis_server: EmbeddedServer, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from headrace_cli.main import main; main()", "exporter", "--port", "0"]
    environ = os.environ | {"HEADRACE_REDIS_URL": redis_server.url}
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen([*command, "--model", "one"], env=environ, stderr=output)
    try:
        url = _wait_for(lambda: log.read_text().partition("metrics on ")[2].partition("/metrics")[0])
        _wait_for(lambda: _status(f"{url}/health/ready") == 200)
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
            assert b'headrace_queue_messages{model="one",queue="headrace.one",state="ready"} 0.0' in response.read()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def _wait_for(condition: Callable[[], Any], timeout: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found
