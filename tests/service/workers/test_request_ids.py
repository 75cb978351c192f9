"""A request id belongs to the first message with it. A second message does not affect the first."""

import json
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgpack
import pytest

from headrace_broker import Client
from service.workers.messages import EMBED, message
from service.workers.service import QUEUE, Service, assert_result_is_stream

PARAMS = {"temperature": 0.0, "max_tokens": 300, "ignore_eos": True}
KWARGS = {"prompt": "the wheel", "sampling_params": PARAMS}
CHOICES = {**PARAMS, "temperature": 0.9, "seed": 7, "n": 2}
PAST = (datetime.now(UTC) - timedelta(days=1)).isoformat()
SEPARATOR = "\x06\x16"


def body(**changes: Any) -> bytes:
    packed: bytes = msgpack.packb([[], {**KWARGS, **changes}, EMBED])
    return packed


def dumped(request_id: str, packed: bytes = b"", **changes: Any) -> str:
    return json.dumps(message(packed or body(prompt="mine"), request_id=request_id, **changes))


def more_choices(request_id: str) -> str:
    return dumped(request_id, body(sampling_params=CHOICES))


def another_prompt(request_id: str) -> str:
    return dumped(request_id)


def another_tenant(request_id: str) -> str:
    return dumped(request_id, body(), tenant="thief")


def wrong_parameter(request_id: str) -> str:
    return dumped(request_id, body(sampling_params={"n": 0}))


def malformed(request_id: str) -> str:
    return dumped(request_id, msgpack.packb([1, 2]))


def undecodable(request_id: str) -> str:
    return dumped(request_id, b"\xc1")


def no_base64(request_id: str) -> str:
    return json.dumps({**message(b"", request_id=request_id), "body": "not base64!"})


def foreign_content_type(request_id: str) -> str:
    return dumped(request_id, content_type="application/x-python-serialize")


def compressed(request_id: str) -> str:
    return dumped(request_id, compression="application/x-gzip")


def expired(request_id: str) -> str:
    return dumped(request_id, expires=PAST)


def the_same_but_expired(request_id: str) -> str:
    return dumped(request_id, body(), expires=PAST)


def far_ahead(request_id: str) -> str:
    return dumped(request_id, eta="2099-01-01T00:00:00")


def unknown_task(request_id: str) -> str:
    return dumped(request_id, task="os.system")


def linked(request_id: str) -> str:
    call = {"task": "t", "args": [], "kwargs": {}, "options": {}}
    return dumped(request_id, msgpack.packb([[], KWARGS, {**EMBED, "callbacks": [call]}]))


def odd_dates(request_id: str) -> str:
    return dumped(request_id, eta="yesterday", expires=[])


def too_large(request_id: str) -> str:
    return dumped(request_id, body(prompt="x" * (13 * 2**20)))


def headers_that_only_python_reads(request_id: str) -> str:
    return dumped(request_id).replace('"headers": {', '"\\u0068eaders" : {')


def headers_in_front_of_a_long_body(request_id: str) -> str:
    made = message(body(prompt="x" * 300_000), request_id=request_id)
    return json.dumps({"headers": made.pop("headers"), **made})


def undecodable_with_headers_that_only_python_reads(request_id: str) -> str:
    return compressed(request_id).replace('"headers": {', '"headers"\n: {')


def in_another_encoding(request_id: str) -> bytes:
    return dumped(request_id).encode("utf-16")


ATTACKS: list[Callable[[str], str | bytes]] = [
    more_choices,
    another_prompt,
    another_tenant,
    wrong_parameter,
    malformed,
    undecodable,
    no_base64,
    foreign_content_type,
    compressed,
    expired,
    the_same_but_expired,
    far_ahead,
    unknown_task,
    linked,
    odd_dates,
    too_large,
    headers_that_only_python_reads,
    headers_in_front_of_a_long_body,
    undecodable_with_headers_that_only_python_reads,
    in_another_encoding,
]


@pytest.fixture(scope="module")
def undisturbed(shared_service: Service) -> Any:
    handle = shared_service.send(KWARGS)
    handle.get(timeout=60)
    return shared_service.stream(handle.id).content


def all_of(service: Service, request_id: str) -> tuple[Any, ...]:
    stored = msgpack.unpackb(service.client.get(f"celery-task-meta-{request_id}"))
    return service.client.xrange(f"headrace:stream:{request_id}"), stored["status"], stored["result"]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_second_message_of_an_id_does_not_affect_the_first_while_it_runs_or_after_its_end(
    service: Service, undisturbed: Any, attack: Callable[[str], str | bytes]
) -> None:
    request_id = uuid.uuid4().hex
    handle = service.send(KWARGS, task_id=request_id)
    service.wait_tokens([request_id], at_least=3)
    service.client.lpush(QUEUE, attack(request_id))
    service.wait_until(lambda: service.queued() == 0)
    result = handle.get(timeout=60)
    log = service.wait_ended([request_id])[request_id]
    assert log.content == undisturbed
    assert len(log.attempts) == 1
    assert_result_is_stream(result, log)
    service.wait_settled()

    before = all_of(service, request_id)
    service.client.lpush(QUEUE, attack(request_id))
    service.wait_settled()
    service.generate(max_tokens=1).get(timeout=60)  # by now the worker's finisher has stored earlier results
    assert all_of(service, request_id) == before
    for letter in service.dead_letters():
        assert letter[b"reason"].partition(b":")[0] in (b"duplicate id", b"undecodable", b"too large", b"rejected")


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_request_can_be_terminated_when_a_second_message_of_its_id_has_come(
    service: Service, attack: Callable[[str], str | bytes]
) -> None:
    for _ in range(9):  # it may be done before
        handle = service.generate(max_tokens=2000)
        service.wait_tokens([handle.id], at_least=3)
        service.client.lpush(QUEUE, attack(handle.id))
        service.wait_until(lambda: service.queued() == 0)
        handle.revoke(terminate=True)
        log = service.wait_ended([handle.id])[handle.id]
        service.wait_settled()
        if log.end and log.end["finish_reason"] == "cancelled":
            return
    pytest.fail("it could not be terminated")


@pytest.mark.parametrize("attack", [more_choices, expired, malformed, undecodable, too_large, wrong_parameter])
def test_a_second_message_of_an_id_does_not_affect_the_first_while_it_waits(
    service: Service, undisturbed: Any, attack: Callable[[str], str | bytes]
) -> None:
    request_id = uuid.uuid4().hex
    service.app.control.broadcast("pause", reply=True, timeout=60, limit=1)
    try:
        service.client.lpush(f"{QUEUE}{SEPARATOR}9", dumped(request_id, body()))
        service.client.lpush(f"{QUEUE}{SEPARATOR}9", attack(request_id))
    finally:
        service.app.control.broadcast("resume", reply=True, timeout=60, limit=1)
    result = service.handle(request_id).get(timeout=60)
    log = service.stream(request_id)
    assert log.content == undisturbed
    assert_result_is_stream(result, log)
    service.wait_settled()


def test_two_messages_of_one_id_with_other_numbers_of_choices_do_not_take_turns_on_it(
    make_service: Callable[..., Service],
) -> None:
    service = make_service()
    workers = [service.start_worker(max_num_seqs=2) for _ in range(2)]
    for worker in workers:
        worker.wait_ready()
    request_id = uuid.uuid4().hex
    handle = service.send({**KWARGS, "sampling_params": CHOICES}, task_id=request_id)
    service.wait_tokens([request_id], at_least=3)
    service.send({**KWARGS, "sampling_params": {**CHOICES, "n": 1}}, task_id=request_id)
    result = handle.get(timeout=60)
    assert len(result["outputs"]) == 2
    assert len(service.stream(request_id).attempts) == 1
    service.wait_settled()
    [letter] = service.dead_letters()
    assert letter[b"reason"] == b"duplicate id"
    with Client(service.url, model="tiny") as client:
        assert client.requeue_dead_letters(client.dead_letters()) == [], "it would delete the first one's result"
    assert handle.get(timeout=1) == result


def test_the_id_of_a_refused_request_does_not_silently_give_its_old_answer(service: Service) -> None:
    request_id = uuid.uuid4().hex
    refused = service.send({"prompt": 5}, task_id=request_id).get(timeout=60)
    assert refused["error"]["code"] == "invalid_request"
    service.wait_settled()
    service.send(KWARGS, task_id=request_id)
    service.wait_settled()
    assert [letter[b"reason"] for letter in service.dead_letters()] == [b"duplicate id"]
    with Client(service.url, model="tiny") as client, pytest.raises(ValueError, match="was used"):
        client.submit("x", request_id=request_id)


@pytest.mark.parametrize(
    "planted", ["18446744073709551615-18446744073709551615", "9007199254740993-5", "7-18446744073709551615"]
)
def test_a_stream_that_cannot_be_extended_is_replaced(service: Service, undisturbed: Any, planted: str) -> None:
    before = service.workers[0].metrics()["headrace_streams_replaced_total"]
    waiting, running = uuid.uuid4().hex, uuid.uuid4().hex
    fields: Any = {"type": "chunk", "data": msgpack.packb({})}
    service.client.xadd(f"headrace:stream:{waiting}", fields, id=planted)
    handles = [service.send(KWARGS, task_id=running)]
    service.wait_tokens([running], at_least=3)
    service.client.xadd(f"headrace:stream:{running}", fields, id=planted)
    handles.append(service.send(KWARGS, task_id=waiting))
    for handle in handles:
        result = handle.get(timeout=60)
        log = service.wait_ended([handle.id])[handle.id]
        assert log.content == undisturbed
        assert_result_is_stream(result, log)
    service.wait_settled()
    assert service.workers[0].metrics()["headrace_streams_replaced_total"] == before + 2
