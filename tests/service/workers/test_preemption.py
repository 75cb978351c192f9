"""A request of a better priority finds no slot: one of a worse priority makes room, and its tokens stay the same."""

from collections.abc import Callable, Sequence
from typing import Any

from celery.result import AsyncResult

from service.workers.service import Service, StreamLog, assert_result_is_stream, results
from service.workers.test_worker_killed import early_stop, greedy, ordered, sampled, structured

KINDS = (greedy, sampled, early_stop, structured)
PREEMPTED = 'headrace_queue_returned_messages_total{reason="preempted"}'


def params_of(number: int) -> dict[str, Any]:
    return {**KINDS[number % 4](number // 4), "max_tokens": 200}


def send_batch(service: Service, count: int) -> list[AsyncResult]:
    return [
        service.send(
            {"prompt": f"The wheel turns {number} times", "sampling_params": params_of(number)},
            priority=9,
        )
        for number in range(count)
    ]


def send_better(service: Service, count: int, priority: int = 0) -> list[AsyncResult]:
    params = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
    return [service.send({"prompt": "now", "sampling_params": params}, priority=priority) for _ in range(count)]


def running(service: Service, handles: Sequence[AsyncResult]) -> list[str]:
    logs = {handle.id: service.stream(handle.id) for handle in handles}
    return [request_id for request_id, log in logs.items() if log.num_tokens > 2 and log.end is None]


def attempts(logs: Sequence[StreamLog]) -> int:
    return sum(len(log.attempts) - 1 for log in logs)


def test_preempted_requests_end_with_the_tokens_of_an_undisturbed_run(make_service: Callable[..., Service]) -> None:
    service = make_service()
    worker = service.start_worker(max_num_seqs=4, preemption_wait_seconds=0).wait_ready()
    handles = send_batch(service, 16)
    undisturbed = ordered(handles, service.wait_ended([handle.id for handle in handles]))
    service.wait_settled()
    assert worker.metrics().get(PREEMPTED, 0) == 0

    handles = send_batch(service, 16)
    ids = [handle.id for handle in handles]
    for number in range(12):
        service.wait_until(lambda: running(service, handles) or all(service.stream(one).end for one in ids))
        better = send_better(service, 1 + number % 4)
        service.wait_ended([handle.id for handle in better])
    disturbed = ordered(handles, service.wait_ended(ids))

    for before, after in zip(undisturbed, disturbed, strict=True):
        assert after.content == before.content
        assert after.prompt_logprobs == before.prompt_logprobs
        assert before.end is not None
        assert after.end is not None
        assert after.end["finish_reason"] == before.end["finish_reason"]
        assert after.end["error"] is None
        assert len(after.attempts) <= 4
    answers = results(handles)
    for handle, log in zip(handles, disturbed, strict=True):
        assert_result_is_stream(answers[handle.id], log)
    assert worker.metrics()[PREEMPTED] == attempts(disturbed) > 5
    service.wait_settled()
    assert worker.metrics()["headrace_requests_in_flight"] == 0
