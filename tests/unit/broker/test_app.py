"""The guarantees of the Celery application, and the cost of importing the package."""

import json
import subprocess
import sys

import pytest

from headrace_broker.app import LEASE_TRANSPORT, make_app
from headrace_broker.settings import BrokerSettings


@pytest.mark.parametrize("worker", [False, True])
def test_no_accepted_serializer_can_run_code(worker: bool) -> None:
    conf = make_app(BrokerSettings(), worker=worker).conf
    assert conf.accept_content == ["json", "msgpack"]
    assert conf.result_accept_content is None  # then accept_content applies
    assert conf.task_serializer == conf.result_serializer == "msgpack"
    assert conf.event_serializer == "json"  # Flower can read it


def test_only_a_worker_uses_the_lease_transport() -> None:
    settings = BrokerSettings(lease_seconds=3, delivery_limit=2, result_ttl_seconds=99)
    producer, worker = make_app(settings).conf, make_app(settings, worker=True, models=["m"]).conf
    assert producer.broker_transport is None
    assert worker.broker_transport == LEASE_TRANSPORT
    assert worker.broker_transport_options["lease_seconds"] == 3
    assert worker.broker_transport_options["delivery_limit"] == 2
    assert [queue.name for queue in worker.task_queues] == ["headrace.m"]
    assert producer.result_expires == worker.result_expires == 99
    assert worker.task_acks_late
    assert worker.worker_soft_shutdown_timeout == 0


@pytest.mark.parametrize("worker", [False, True])
def test_sentinels_may_have_ipv6_addresses(worker: bool) -> None:
    app = make_app(BrokerSettings("sentinel://[::1]:5000,[::2]/3?master=m"), worker=worker, models=["m"])
    with app.connection_for_read() as connection:
        assert (connection.hostname, connection.port, connection.virtual_host) == ("::1", 5000, "3")


def test_importing_the_package_loads_no_heavy_module() -> None:
    program = "import headrace_broker, json, sys; print(json.dumps(sorted(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
    loaded = {name.partition(".")[0] for name in json.loads(output)}
    assert loaded.isdisjoint({"torch", "transformers", "tokenizers", "numpy", "pydantic", "rich", "structlog"})
    assert "headrace_broker" in loaded
