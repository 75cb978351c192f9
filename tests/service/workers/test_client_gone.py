"""An abandoned request is cancelled; one with subscriber heartbeats is not."""

from headrace_broker.client.client import Client
from service.workers.service import DEADLINE, Service, assert_result_is_stream

LONG = 1900
PARAMS = {"temperature": 1.0, "max_tokens": LONG, "ignore_eos": True, "n": 16, "seed": 1}


def assert_abandoned(service: Service, request_id: str) -> None:
    log = service.wait_ended([request_id])[request_id]
    assert log.end is not None
    assert log.end["finish_reason"] == "cancelled"
    assert log.end["error"]["message"] == "no subscriber sent a heartbeat for 1 s, the request's abandon_after"
    assert log.num_tokens < 16 * LONG
    assert_result_is_stream(service.handle(request_id).get(timeout=DEADLINE), log)
    service.wait_settled()
    service.wait_until(lambda: not service.client.exists(f"headrace:listener:{request_id}"))


def test_a_request_whose_subscriber_has_gone_is_cancelled(service: Service) -> None:
    with Client(service.server.url, model="tiny") as client:
        request_id = client.submit("the wheel", PARAMS, abandon_after=1)
        stream = client.stream(request_id, timeout=DEADLINE)
        next(stream)
        stream.close()
    assert_abandoned(service, request_id)


def test_a_plain_celery_producer_sets_abandon_after_in_a_header(service: Service) -> None:
    handle = service.send({"prompt": "the wheel", "sampling_params": PARAMS}, headers={"abandon_after": 1})
    assert_abandoned(service, handle.id)


def test_a_request_read_by_one_subscriber_after_another_runs_to_its_end(service: Service) -> None:
    params = {**PARAMS, "n": 1, "max_tokens": 200}
    with Client(service.server.url, model="tiny") as first, Client(service.server.url) as second:
        request_id = first.submit("the wheel", params, abandon_after=60)
        stream = first.stream(request_id, timeout=DEADLINE)
        chunks = [next(stream)]
        stream.close()
        chunks += second.stream(request_id, last_id=chunks[0].entry_id, timeout=DEADLINE)
        assert sum(len(chunk.token_ids) for chunk in chunks) == 200
        assert first.result(request_id, timeout=DEADLINE).usage is not None
    service.wait_settled()
