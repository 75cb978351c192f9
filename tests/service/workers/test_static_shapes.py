"""The service on a device with static shapes: control of requests, structured outputs, and ranks that die.

All other service tests run on it too, with HEADRACE_TEST_DEVICE=static-cpu in the environment.
"""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.servers import make_server
from service.workers.service import Service, StreamLog
from service.workers.test_control import (
    test_a_client_cancels_a_running_request_and_its_slot_is_free_again,
    test_a_request_whose_deadline_passes_while_it_runs_keeps_its_tokens,
    test_revoke_with_terminate_stops_a_running_request_and_ends_its_stream,
)
from service.workers.test_plain_celery import test_a_request_may_have_more_choices_than_the_worker_has_slots
from service.workers.test_structured_outputs import test_a_schema_sent_through_the_queue_gives_json_that_matches_it
from service.workers.worker_process import WorkerProcess

__all__ = [
    "test_a_client_cancels_a_running_request_and_its_slot_is_free_again",
    "test_a_request_may_have_more_choices_than_the_worker_has_slots",
    "test_a_request_whose_deadline_passes_while_it_runs_keeps_its_tokens",
    "test_a_schema_sent_through_the_queue_gives_json_that_matches_it",
    "test_revoke_with_terminate_stops_a_running_request_and_ends_its_stream",
]

pytestmark = pytest.mark.rotated_file("engine/headrace_engine/runner/static")


@pytest.fixture(scope="module")
def static_service(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with make_server() as server:
        service = Service(server, model_folder, tmp_path_factory.mktemp("static"))
        try:
            service.start_worker(device="static-cpu").wait_ready()
            yield service
        finally:
            service.close()


@pytest.fixture
def service(static_service: Service) -> Service:
    """Replaces the fixture that the imported tests use elsewhere."""
    static_service.wait_settled()
    return static_service


def test_a_killed_rank_restarts_the_engine_and_loses_no_token(
    make_service: Callable[..., Service],
) -> None:
    service = make_service()
    worker = service.start_worker(
        device="static-cpu", tensor_parallel_size=2, max_num_seqs=4, max_model_len=512, decode_buckets="4"
    ).wait_ready()
    expected = [log.content for log in generate(service)]
    ids = send(service)
    service.wait_tokens(ids, at_least=3)
    (rank,) = ranks(worker)
    os.kill(rank, signal.SIGKILL)
    logs = [service.wait_ended(ids)[request_id] for request_id in ids]
    assert [log.content for log in logs] == expected
    assert all(len(log.attempts) == 1 for log in logs)
    assert worker.metrics()['headrace_engine_restarts_total{reason="crash"}'] == 1
    (successor,) = ranks(worker)
    assert successor != rank
    worker.kill()
    worker.assert_nothing_left()


def send(service: Service) -> list[str]:
    return [service.generate(f"the wheel {number}", max_tokens=120).id for number in range(3)]


def generate(service: Service) -> list[StreamLog]:
    ids = send(service)
    logs = service.wait_ended(ids)
    return [logs[request_id] for request_id in ids]


def ranks(worker: WorkerProcess) -> list[int]:
    """List the processes of all ranks except the first."""
    return [pid for pid in worker.processes() if b"static.worker_rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]
