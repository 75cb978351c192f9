"""Requests that end early or come twice: revoked, cancelled, expired, redelivered."""

import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from headrace_broker.client.client import Client
from headrace_broker.results import Usage
from headrace_broker.streams.grant import Grant
from headrace_broker.streams.writer import StreamWrite, StreamWriter
from service.workers.service import DEADLINE, Service, assert_result_is_stream

LONG = 2000


def test_revoke_with_terminate_stops_a_running_request_and_ends_its_stream(service: Service) -> None:
    handle = service.generate(max_tokens=LONG)
    service.wait_tokens([handle.id], at_least=3)
    handle.revoke(terminate=True)
    log = service.wait_ended([handle.id])[handle.id]
    assert log.end is not None
    assert log.end["finish_reason"] == "cancelled"
    assert log.num_tokens < LONG
    with pytest.raises(TaskRevokedError):
        handle.get(timeout=60)
    service.wait_settled()


def test_a_client_cancels_a_running_request_and_its_slot_is_free_again(service: Service) -> None:
    with Client(service.server.url) as client:
        handle = service.generate(max_tokens=LONG)
        service.wait_tokens([handle.id], at_least=3)
        assert client.cancel(handle.id)
    result = handle.get(timeout=60)
    assert result["error"]["code"] == "cancelled"
    service.wait_settled()
    service.wait_until(lambda: service.workers[0].metrics()['headrace_worker_slots{state="used"}'] == 0)


def test_a_request_that_was_cancelled_in_the_queue_never_runs(make_service: Callable[..., Service]) -> None:
    service = make_service()
    handle = service.generate()
    with Client(service.server.url) as client:
        assert client.cancel(handle.id)
    service.start_worker()
    assert handle.get(timeout=60)["error"]["code"] == "cancelled"
    assert service.stream(handle.id).attempts == []
    service.wait_settled()


def test_a_request_that_was_revoked_in_the_queue_never_runs(make_service: Callable[..., Service]) -> None:
    service = make_service()
    service.start_worker(max_num_seqs=1).wait_ready()
    running = service.generate(max_tokens=LONG)
    service.wait_tokens([running.id], at_least=1)
    waiting = service.generate()
    service.app.control.revoke(waiting.id, reply=True, timeout=60, limit=1)
    running.revoke(terminate=True)
    log = service.wait_ended([waiting.id])[waiting.id]
    assert log.end is not None
    assert log.end["finish_reason"] == "cancelled"
    assert log.attempts == []
    service.wait_settled()


def test_a_request_whose_deadline_passed_in_the_queue_expires(service: Service) -> None:
    handle = service.send(
        {"prompt": "x"},
        expires=datetime.now(UTC) - timedelta(seconds=1),
    )
    log = service.wait_ended([handle.id])[handle.id]
    assert log.end is not None
    assert log.end["finish_reason"] == "expired"
    assert log.attempts == []


def test_a_request_whose_deadline_passes_while_it_runs_keeps_its_tokens(service: Service) -> None:
    result = end_while_it_runs(service, lambda seconds: {"expires": datetime.now(UTC) + timedelta(seconds=seconds)})
    assert result["error"]["code"] == "expired"
    assert 0 < result["usage"]["completion_tokens"] < LONG
    assert_result_is_stream(result, service.stream(result["request_id"]))


def end_while_it_runs(service: Service, options: Callable[[float], dict[str, Any]]) -> dict[str, Any]:
    """Send a long request with options that end it after some seconds; retry until that happens while it runs."""
    params = {"temperature": 0.0, "max_tokens": LONG, "ignore_eos": True}
    seconds = 0.5
    while True:
        handle = service.send({"prompt": "x", "sampling_params": params}, **options(seconds))
        result: dict[str, Any] = handle.get(timeout=DEADLINE)
        if 0 < result["usage"]["completion_tokens"] < LONG:
            return result
        seconds *= 2 if result["error"] else 0.7


def test_a_finished_request_that_is_redelivered_is_answered_from_its_stream(service: Service) -> None:
    request_id = uuid.uuid4().hex
    writer = StreamWriter(service.client, 60)
    attempt = writer.claim(request_id, "a worker that died before it acknowledged").attempt
    chunk = StreamWrite.chunk(
        request_id, attempt, 2, index=0, token_ids=[7, 8], text="done", finish_reason="stop", stop_reason=None
    )
    writer.publish([chunk, StreamWrite.end(request_id, attempt, 2, finish_reason="stop", usage=Usage(1, 0, 2))])
    handle = service.send({"prompt": "x"}, task_id=request_id)
    result = handle.get(timeout=60)
    assert result["outputs"][0]["text"] == "done"
    log = service.stream(request_id)
    assert log.attempts == [1]
    assert_result_is_stream(result, log)
    service.wait_settled()


def test_a_stream_with_a_later_attempt_than_the_lease_is_continued(service: Service) -> None:
    """As after the loss of the lease's record: the worker asks the queue for a number above the stream's."""
    request_id = uuid.uuid4().hex
    writer = StreamWriter(service.client, 60)
    writer.claim(request_id, "a worker that died", grant=Grant(4, "o" * 32))
    writer.publish([StreamWrite.chunk(request_id, 4, 2, index=0, token_ids=[7, 8], text="ab")])
    params = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
    result = service.send({"prompt": "x", "sampling_params": params}, task_id=request_id).get(timeout=DEADLINE)
    log = service.wait_ended([request_id])[request_id]
    assert log.attempts == [4, 5]
    assert result["outputs"][0]["token_ids"][:2] == [7, 8]
    assert_result_is_stream(result, log)
    service.wait_settled()


def test_the_same_request_sent_twice_is_generated_once(service: Service) -> None:
    request_id = uuid.uuid4().hex
    kwargs = {"prompt": "x", "sampling_params": {"temperature": 0.0, "max_tokens": 300, "ignore_eos": True}}
    handle = service.send(kwargs, task_id=request_id)
    service.wait_tokens([request_id], at_least=3)
    service.send(kwargs, task_id=request_id)
    result = handle.get(timeout=DEADLINE)
    log = service.wait_ended([request_id])[request_id]
    assert log.num_tokens == 300
    assert_result_is_stream(result, log)
    service.wait_settled()


def test_a_time_limit_ends_a_request_as_its_deadline_does(service: Service) -> None:
    result = end_while_it_runs(service, lambda seconds: {"time_limit": seconds, "soft_time_limit": 60})
    assert result["error"]["code"] == "expired"
    assert 0 < result["usage"]["completion_tokens"] < LONG
    service.wait_settled()


def test_a_request_that_was_sent_twice_can_still_be_revoked(service: Service) -> None:
    request_id = uuid.uuid4().hex
    kwargs = {"prompt": "x", "sampling_params": {"temperature": 0.0, "max_tokens": LONG, "ignore_eos": True}}
    handle = service.send(kwargs, task_id=request_id)
    service.wait_tokens([request_id], at_least=3)
    service.send(kwargs, task_id=request_id)
    service.wait_until(lambda: service.queued() == 0 and service.leased() == 1)
    handle.revoke(terminate=True)
    log = service.wait_ended([request_id])[request_id]
    assert log.end is not None
    assert log.end["finish_reason"] == "cancelled"
    service.wait_settled()


def test_celery_inspect_shows_running_requests_without_their_prompts(service: Service) -> None:
    handle = service.generate("the wheel Zanzibar", max_tokens=LONG)
    service.wait_tokens([handle.id], at_least=1)
    active = service.app.control.inspect(timeout=60, limit=1).active()
    handle.revoke(terminate=True)
    [requests] = active.values()
    assert [request["id"] for request in requests] == [handle.id]
    assert "Zanzibar" not in str(active)
    service.wait_ended([handle.id])
    service.wait_settled()
