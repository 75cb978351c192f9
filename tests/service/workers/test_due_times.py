"""Real workers, whose engines sleep, and messages with the header `due`."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from celery.result import AsyncResult

from fleet.workers import SleepingService, sleeping_service
from service.workers.service import Service, assert_result_is_stream, results

pytestmark = pytest.mark.rotated(
    "broker/headrace_broker/queue", "broker/headrace_broker/lua", "workers/headrace_workers/requests"
)

STEP_SECONDS = 0.02
PREEMPTED = 'headrace_queue_returned_messages_total{reason="preempted"}'


@pytest.fixture(scope="module")
def server() -> Iterator[SleepingService]:
    with sleeping_service(STEP_SECONDS) as service:
        yield service


@pytest.fixture
def service(server: SleepingService) -> Iterator[SleepingService]:
    """A server without workers and messages."""
    yield server
    for worker in server.workers:
        worker.close()
    server.forget()
    server.client.flushall()


def send(
    service: Service, due: object = None, *, max_tokens: int = 8, priority: int = 9, headers: Mapping[str, Any] = {}
) -> AsyncResult:
    """Send a message that is due in so many seconds; None: it has no due time."""
    if due is not None:
        headers = {**headers, "due": time.time() + due if isinstance(due, (int, float)) else due}
    params = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    return service.send({"prompt": "the wheel", "sampling_params": params}, headers=dict(headers), priority=priority)


def test_a_worker_serves_the_request_with_the_least_slack_and_those_without_a_due_time_as_they_came(
    service: SleepingService,
) -> None:
    first = send(service)
    by_slack = [send(service, 20_000 - 1000 * number) for number in range(5)]
    last = send(service)
    late = send(service, -60)
    better = send(service, priority=0)
    handles = [better, late, first, *reversed(by_slack), last]
    service.start_workers(1, slots=1, fetch_quantum=1)
    assert all(result["error"] is None for result in results(handles).values())
    assert sorted(handles, key=lambda handle: handle.date_done) == handles
    service.wait_settled()


def test_a_request_that_must_start_preempts_one_of_lower_priority(service: SleepingService) -> None:
    service.start_workers(1, slots=1, preemption_wait_seconds=0)
    running = send(service, max_tokens=600)
    service.wait_tokens([running.id], at_least=3)
    due = send(service, -60)
    logs = service.wait_ended([due.id, running.id])
    assert results([due])[due.id]["error"] is None
    assert logs[running.id].attempts == [1, 2]
    assert due.date_done < running.date_done
    assert_result_is_stream(results([running])[running.id], logs[running.id])
    assert service.workers[0].metrics()[PREEMPTED] == 1
    service.wait_settled()


def test_a_waiting_request_preempts_when_its_time_comes_though_no_message_arrives(
    service: SleepingService,
) -> None:
    service.start_workers(1, slots=1, preemption_wait_seconds=0)
    running = send(service, max_tokens=600)
    service.wait_tokens([running.id], at_least=3)
    waiting = send(service, 28)  # 256 tokens are expected, of 0.05 s each, and it gets twice that time: 25.6 s
    logs = service.wait_ended([waiting.id, running.id])
    assert waiting.date_done < running.date_done
    assert logs[running.id].attempts == [1, 2]
    service.wait_settled()


def test_requests_that_must_start_do_not_preempt_each_other_nor_those_of_the_highest_priority(
    service: SleepingService,
) -> None:
    service.start_workers(1, slots=2, preemption_wait_seconds=0)
    running = [send(service, -60, max_tokens=200), send(service, max_tokens=200, priority=0)]
    service.wait_tokens([handle.id for handle in running], at_least=3)
    due = [send(service, -120) for _ in range(3)]
    logs = service.wait_ended([handle.id for handle in (*running, *due)])
    assert {tuple(log.attempts) for log in logs.values()} == {(1,)}
    assert service.workers[0].metrics().get(PREEMPTED, 0) == 0


def test_a_request_whose_due_time_is_no_number_of_seconds_is_refused_by_name(
    service: SleepingService,
) -> None:
    service.start_workers(1)
    for value, shown in (("soon", "a string of length 4"), ([], "a list"), (True, "true"), (float("nan"), "nan")):
        handle = send(service, headers={"due": value})
        error = results([handle])[handle.id]["error"]
        assert error["code"] == "invalid_request"
        assert error["message"] == f"due must be a number of unix seconds from 0 to 8589934592, got {shown}"
    for value in (0, 2**33, 1.5):
        handle = send(service, headers={"due": value})
        assert results([handle])[handle.id]["error"] is None
    service.wait_settled()
    assert service.client.keys("headrace:queue:latest-starts*") == []


def test_due_requests_of_a_killed_worker_end_once(service: SleepingService) -> None:
    dues = [None, 5000, -5, 26.5]
    handles = [send(service, dues[number % 4], max_tokens=200, priority=number % 10) for number in range(24)]
    service.start_workers(1, slots=4, lease_seconds=2)
    (first,) = service.workers
    service.wait_tokens([handles[2].id], at_least=3)
    first.kill()
    first.assert_nothing_left()
    service.start_workers(2, slots=4, lease_seconds=2)
    logs = service.wait_ended([handle.id for handle in handles])
    for request_id, result in results(handles).items():
        assert result["error"] is None
        assert_result_is_stream(result, logs[request_id])
        assert logs[request_id].num_tokens == 200
    assert any(len(log.attempts) > 1 for log in logs.values())
    service.wait_settled()
    assert service.dead_letters() == []
    assert service.client.keys("headrace:queue:latest-starts*") == []
