"""Real workers with `--order deadline`, alone and beside workers without it."""

from collections.abc import Callable

from celery.result import AsyncResult

from service.workers.service import Service, assert_result_is_stream, results


def send(service: Service, expires: int | None, *, max_tokens: int = 8) -> AsyncResult:
    params = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    return service.send({"prompt": "the wheel", "sampling_params": params}, expires=expires)


def test_a_worker_serves_the_request_that_expires_first(make_service: Callable[..., Service]) -> None:
    service = make_service()
    without = send(service, None)
    handles = [send(service, 5000 - 100 * number) for number in range(5)]
    service.start_worker(max_num_seqs=1, order="deadline")
    assert all(result["error"] is None for result in results([without, *handles]).values())
    assert sorted([without, *handles], key=lambda handle: handle.date_done) == [*reversed(handles), without]
    service.wait_settled()


def test_requests_of_a_killed_worker_end_once_beside_workers_of_both_settings(
    make_service: Callable[..., Service],
) -> None:
    service = make_service()
    handles = [send(service, 4000 - 10 * number if number % 3 else None, max_tokens=200) for number in range(24)]
    settings = {"lease_seconds": 2, "max_num_seqs": 4}
    first = service.start_worker(order="deadline", **settings)
    service.wait_tokens([handles[23].id], at_least=3)
    first.kill()
    first.assert_nothing_left()
    for order in ("arrival", "deadline"):
        service.start_worker(order=order, **settings)
    logs = service.wait_ended([handle.id for handle in handles])
    for request_id, result in results(handles).items():
        assert result["error"] is None
        assert_result_is_stream(result, logs[request_id])
        assert logs[request_id].num_tokens == 200
    assert any(len(log.attempts) == 2 for log in logs.values())
    service.wait_settled()
    assert service.dead_letters() == []
    assert service.client.keys("headrace:queue:deadlines*") == []
