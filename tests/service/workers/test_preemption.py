"""A request of higher priority preempts one of lower priority, which gets the same tokens as without."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from celery.result import AsyncResult
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.servers import make_server
from service.workers.service import Service, assert_result_is_stream, results
from service.workers.test_worker_killed import early_stop, greedy, ordered, sampled, structured

KINDS = (greedy, sampled, early_stop, structured)
MAX_PREEMPTIONS = 3
PREEMPTED = 'headrace_queue_returned_messages_total{reason="preempted"}'


def params_of(number: int) -> dict[str, Any]:
    return {**KINDS[number % 4](number // 4), "max_tokens": 200}


def send_batch(service: Service, numbers: Sequence[int]) -> list[AsyncResult]:
    return [
        service.send(
            {"prompt": f"The wheel turns {number} times", "sampling_params": params_of(number)},
            priority=9,
        )
        for number in numbers
    ]


def send_better(service: Service, count: int, priority: int = 0, max_tokens: int = 4) -> list[AsyncResult]:
    params = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    return [service.send({"prompt": "now", "sampling_params": params}, priority=priority) for _ in range(count)]


def any_has(service: Service, request_ids: Sequence[str], num_tokens: int) -> bool:
    """Whether a running request has so many tokens, or all have ended."""
    logs = [service.stream(request_id) for request_id in request_ids]
    return any(log.num_tokens >= num_tokens and log.end is None for log in logs) or all(log.end for log in logs)


@pytest.fixture(scope="module")
def preempting(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Run a server and two workers of four slots. One of them has a publish interval."""
    with make_server() as server:
        service = Service(server, model_folder, tmp_path_factory.mktemp("preempting"))
        try:
            for publish_interval in (0, 0.02):
                service.start_worker(max_num_seqs=4, preemption_wait_seconds=0, publish_interval=publish_interval)
            for worker in service.workers:
                worker.wait_ready()
            yield service
        finally:
            service.close()


def preempted(service: Service) -> float:
    return sum(worker.metrics().get(PREEMPTED, 0) for worker in service.workers)


@pytest.mark.rotated("broker/headrace_broker/queue", "broker/headrace_broker/lua", "workers/headrace_workers/requests")
def test_a_preempted_request_has_the_tokens_of_an_uninterrupted_run(preempting: Service) -> None:
    """Greedy and seeded, one choice and two, stop strings, log-probabilities, penalties, grammars."""
    counts: list[int] = []

    @given(
        numbers=st.lists(st.integers(0, 15), min_size=10, max_size=14),
        waves=st.lists(
            st.tuples(st.integers(1, 6), st.integers(1, 30), st.sampled_from([0, 3])), min_size=3, max_size=6
        ),
    )
    @settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    def check(numbers: list[int], waves: list[tuple[int, int, int]]) -> None:
        counts.append(check_against_undisturbed(preempting, numbers, waves))

    check()
    assert sum(counts) > len(counts)


def check_against_undisturbed(service: Service, numbers: list[int], waves: list[tuple[int, int, int]]) -> int:
    """Send waves of requests of higher priority: (count, tokens that a request of the batch has by then, priority)."""
    before = preempted(service)
    handles = send_batch(service, numbers)
    undisturbed = ordered(handles, service.wait_ended([handle.id for handle in handles]))
    service.wait_settled()
    assert preempted(service) == before

    handles = send_batch(service, numbers)
    ids = [handle.id for handle in handles]
    for count, num_tokens, priority in waves:
        service.wait_until(partial(any_has, service, ids, num_tokens))
        service.wait_ended([handle.id for handle in send_better(service, count, priority)])
    disturbed = ordered(handles, service.wait_ended(ids))

    for expected, log in zip(undisturbed, disturbed, strict=True):
        assert log.content == expected.content
        assert log.prompt_logprobs == expected.prompt_logprobs
        assert expected.end is not None
        assert log.end is not None
        assert log.end["finish_reason"] == expected.end["finish_reason"]
        assert log.end["error"] is None
        assert len(log.attempts) <= 1 + MAX_PREEMPTIONS
    answers = results(handles)
    for handle, log in zip(handles, disturbed, strict=True):
        assert_result_is_stream(answers[handle.id], log)
    num_preempted = sum(len(log.attempts) - 1 for log in disturbed)
    assert preempted(service) - before == num_preempted
    service.wait_settled()
    return num_preempted


def fill(service: Service, count: int, max_tokens: int = 1500) -> list[AsyncResult]:
    """Start long requests of the lowest priority and wait until all run."""
    params = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    handles = [service.send({"prompt": f"{n}", "sampling_params": params}, priority=9) for n in range(count)]
    service.wait_tokens([handle.id for handle in handles], at_least=3)
    return handles


def test_several_workers_preempt_once_for_one_request(make_service: Callable[..., Service]) -> None:
    service = make_service()
    for _ in range(2):
        service.start_worker(max_num_seqs=2, preemption_wait_seconds=0)
    for worker in service.workers:
        worker.wait_ready()
    for count in (1, 2, 3):
        handles = fill(service, 4, max_tokens=500)
        service.wait_ended([handle.id for handle in (*handles, *send_better(service, count))])
    lines = [line for worker in service.workers for line in worker.log_lines() if line["event"] == "request preempted"]
    better = [line["preempted_by"] for line in lines]
    assert len(set(better)) == len(better) == preempted(service) >= 1


def test_a_free_slot_of_another_worker_is_used_first(make_service: Callable[..., Service]) -> None:
    service = make_service()
    service.start_worker(max_num_seqs=2, preemption_wait_seconds=60).wait_ready()
    handles = fill(service, 2)
    service.start_worker(max_num_seqs=2).wait_ready()
    for _ in range(5):
        service.wait_ended([handle.id for handle in send_better(service, 1)])
    logs = service.wait_ended([handle.id for handle in handles])
    assert [len(log.attempts) for log in logs.values()] == [1, 1]


def test_a_request_is_preempted_max_preemptions_times_at_most(make_service: Callable[..., Service]) -> None:
    service = make_service()
    service.start_worker(max_num_seqs=1, preemption_wait_seconds=0).wait_ready()
    (handle,) = fill(service, 1)
    for attempt in range(1, 1 + MAX_PREEMPTIONS):
        service.wait_until(lambda n=attempt: len(service.stream(handle.id).attempts) == n)
        service.wait_tokens([handle.id], at_least=5 * attempt)
        service.wait_ended([better.id for better in send_better(service, 1)])
    service.wait_until(lambda: len(service.stream(handle.id).attempts) == 1 + MAX_PREEMPTIONS)
    (late,) = send_better(service, 1)
    assert len(service.wait_ended([handle.id])[handle.id].attempts) == 1 + MAX_PREEMPTIONS
    service.wait_ended([late.id])
    service.wait_settled()


def test_requests_of_one_priority_preempt_nothing(make_service: Callable[..., Service]) -> None:
    service = make_service()
    worker = service.start_worker(max_num_seqs=1, preemption_wait_seconds=0).wait_ready()
    (handle,) = fill(service, 1, max_tokens=300)
    equal = send_better(service, 2, priority=9)
    service.wait_ended([handle.id, *(one.id for one in equal)])
    assert worker.metrics().get(PREEMPTED, 0) == 0


def test_without_preemption_a_request_of_higher_priority_waits(make_service: Callable[..., Service]) -> None:
    service = make_service()
    worker = service.start_worker(max_num_seqs=1, max_preemptions=0).wait_ready()
    (handle,) = fill(service, 1, max_tokens=300)
    (better,) = send_better(service, 1)
    logs = service.wait_ended([handle.id, better.id])
    assert len(logs[handle.id].attempts) == 1
    assert worker.metrics().get(PREEMPTED, 0) == 0


def test_a_request_preempted_on_a_worker_that_dies_resumes_on_another(make_service: Callable[..., Service]) -> None:
    service = make_service()
    first = service.start_worker(max_num_seqs=1, preemption_wait_seconds=0, lease_seconds=2).wait_ready()
    (handle,) = fill(service, 1)
    (better,) = send_better(service, 1, max_tokens=1500)
    service.wait_tokens([better.id], at_least=1)
    first.kill()
    service.start_worker(lease_seconds=2)
    logs = service.wait_ended([handle.id, better.id])
    assert [len(logs[one.id].attempts) for one in (handle, better)] == [2, 2]
    assert [logs[one.id].num_tokens for one in (handle, better)] == [1500, 1500]
    service.wait_settled()
