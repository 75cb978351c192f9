"""A real Prometheus says how many workers the queue's work needs, also while none runs."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from headrace_broker.client.client import Client
from headrace_broker.keys import queue_lists
from service.operations.conftest import Watched
from service.operations.prometheus import prometheus_or_skip
from service.servers import make_server
from service.workers.conftest import model_folder
from service.workers.service import QUEUE, Service

__all__ = ["model_folder"]

pytestmark = [pytest.mark.rotated_file("monitoring"), pytest.mark.timeout(900)]

NUM_REQUESTS = 10_000
NUM_SLOTS = 8
PROMPT = "the wheel"
LONGEST_SECONDS = 300.0  # only a failure waits so long
WANTED = 'headrace:workers_wanted{signal="work"}'


@pytest.fixture
def watched(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    prometheus_or_skip()
    with ExitStack() as stack:
        server = stack.enter_context(make_server())
        service = Service(server, model_folder, tmp_path_factory.mktemp("wanted"))
        stack.callback(service.close)
        yield Watched(service, tmp_path_factory.mktemp("prometheus"), stack, max_num_seqs=NUM_SLOTS)


def measure_speed(watched: Watched) -> None:
    """Keep all slots busy until Prometheus has the speed."""
    service = watched.service

    def has_speed() -> bool:
        for _ in range(service.queued(), NUM_SLOTS):
            service.generate(PROMPT, max_tokens=200)
        return (watched.prometheus.value("headrace_worker_tokens_per_second") or 0.0) > 0

    watched.prometheus.wait_until(has_speed, LONGEST_SECONDS)
    service.wait_settled(LONGEST_SECONDS)


def serve(watched: Watched, cost: int) -> None:
    """Run requests of `cost` tokens until they are the average, with too few at once to measure a speed."""
    usage = watched.service.generate(PROMPT, max_tokens=1).get(timeout=LONGEST_SECONDS)["usage"]
    for _ in range(10):  # then the earlier average is left with 0.8 ** 40 of its weight
        handles = [
            watched.service.generate(PROMPT, max_tokens=cost - usage["prompt_tokens"]) for _ in range(NUM_SLOTS // 2)
        ]
        for handle in handles:
            handle.get(timeout=LONGEST_SECONDS)
    watched.service.wait_settled(LONGEST_SECONDS)


def wait_ready_messages(watched: Watched, number: int) -> None:
    ready = 'max(headrace_queue_messages{job="headrace-exporter",state="ready"})'
    tokens = 'headrace_outstanding_tokens{state="waiting"}'
    watched.prometheus.wait_until(
        lambda: watched.prometheus.value(ready) == number and bool(watched.prometheus.value(tokens)) == bool(number),
        LONGEST_SECONDS,
    )


def wanted_without_workers(watched: Watched, cost: int) -> float:
    """Stop the worker and fill the queue with requests of `cost` tokens. Returns the workers wanted."""
    wait_ready_messages(watched, 0)
    watched.service.workers[-1].close()
    with Client(watched.service.url, model="tiny") as client:
        client.submit_many([{"prompt": PROMPT, "sampling_params": {"max_tokens": cost}}] * NUM_REQUESTS)
    wait_ready_messages(watched, NUM_REQUESTS)
    value = watched.prometheus.value
    watched.prometheus.wait_until(lambda: value(WANTED) == value("sum(headrace_outstanding_worker_seconds) / 60"))
    found = value(WANTED)
    watched.service.client.delete(*queue_lists(QUEUE))
    assert found is not None
    return found


def test_the_workers_wanted_follow_the_tokens_and_no_request_is_lost_without_workers(watched: Watched) -> None:
    service, prometheus = watched.service, watched.prometheus
    measure_speed(watched)
    found = {}
    for cost in (10, 1_000):
        serve(watched, cost)
        found[cost] = wanted_without_workers(watched, cost)
        wait_ready_messages(watched, 0)
        service.start_worker(tenants="acme", max_num_seqs=NUM_SLOTS).wait_ready()
    print(f"\nworkers wanted for {NUM_REQUESTS} requests, by their tokens: {found}")  # noqa: T201
    assert found[1_000] / found[10] == pytest.approx(100, rel=0.1)

    handles = [service.generate(PROMPT, max_tokens=100) for _ in range(40)]
    service.wait_tokens([handles[0].id], at_least=1)
    service.workers[-1].close()  # by SIGKILL
    prometheus.wait_until(lambda: (prometheus.value(WANTED) or 0.0) > 0)
    service.start_worker(tenants="acme", max_num_seqs=NUM_SLOTS).wait_ready()
    logs = service.wait_ended([handle.id for handle in handles], LONGEST_SECONDS)
    assert {log.num_tokens for log in logs.values()} == {100}
    service.wait_settled(LONGEST_SECONDS)
    prometheus.wait_until(lambda: prometheus.value(WANTED) == 0)
