"""A real worker, gateway and exporter under some load, a machine's counters, and a Prometheus that scrapes them all."""

import json
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client import start_http_server

from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import free_port
from headrace_cli.exporter import Exporter
from headrace_cli.local.process import LocalGateway
from service.operations.prometheus import Prometheus, prometheus_or_skip
from service.servers import make_server
from service.workers.conftest import model_folder
from service.workers.service import Service
from unit.monitoring import neuron_monitor

__all__ = ["model_folder"]


class Watched:
    """A service, and the Prometheus that scrapes it."""

    def __init__(
        self,
        service: Service,
        folder: Path,
        stack: ExitStack,
        shortened: Mapping[str, str] | None = None,
        **settings: object,
    ) -> None:
        self.service = service
        self.worker = service.start_worker(tenants="acme", **settings).wait_ready()
        client = stack.enter_context(connect(service.server.url))
        self.exporter = Exporter(client, models=["tiny"], interval_seconds=0.5, port=0)
        thread = threading.Thread(target=self.exporter.run, daemon=True)
        thread.start()
        stack.callback(thread.join, 10)
        stack.callback(self.exporter.stop)
        while self.exporter.server.url.endswith(":0"):
            time.sleep(0.01)
        devices, serving = start_http_server(0, addr="127.0.0.1", registry=neuron_monitor.registry())
        stack.callback(serving.join, 10)
        stack.callback(devices.server_close)
        stack.callback(devices.shutdown)
        port = free_port()
        self.gateway = stack.enter_context(
            LocalGateway(redis_url=service.server.url, log=folder / "gateway.log", metrics_port=port)
        )
        self.gateway.wait_ready()
        jobs = {
            "headrace-gateway": f"http://127.0.0.1:{port}",
            "headrace-worker": self.worker.url,
            "headrace-exporter": self.exporter.server.url,
            "neuron-monitor": f"http://127.0.0.1:{devices.server_port}",
        }
        self.prometheus = stack.enter_context(
            Prometheus(folder, {job: urlsplit(url).netloc for job, url in jobs.items()}, shortened=shortened)
        )

    def load(self, requests: int = 6) -> None:
        """Send requests of several tenants and priorities, and wait until Prometheus sees their ends and no work."""
        before = self.prometheus.value("sum(headrace_requests_total)") or 0.0
        params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
        for number in range(requests):
            headers = {"enqueued_at": time.time()} | ({"tenant": "acme"} if number % 2 else {})
            self.service.send(
                {"prompt": "the wheel", "sampling_params": params}, headers=headers, priority=3 * (number % 3)
            )
        body = {"model": "tiny", "prompt": "the wheel", "max_tokens": 4}
        request = urllib.request.Request(  # our own address
            f"{self.gateway.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
        self.prometheus.wait_until(
            lambda: (self.prometheus.value("sum(headrace_requests_total)") or 0.0) >= before + requests + 1
        )
        # While messages are out and no speed is known, the exporter has no value for the seconds of work.
        self.prometheus.wait_until(lambda: self.prometheus.value("sum(headrace_outstanding_worker_seconds)") == 0)


@pytest.fixture(scope="module")
def watched(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    prometheus_or_skip()

    with ExitStack() as stack:
        server = stack.enter_context(make_server())
        service = Service(server, model_folder, tmp_path_factory.mktemp("watched"))
        stack.callback(service.close)
        found = Watched(service, tmp_path_factory.mktemp("prometheus"), stack)
        found.prometheus.wait_until(lambda: len(found.prometheus.query("headrace_requests_total")) > 0)
        found.load()
        found.load()
        yield found
