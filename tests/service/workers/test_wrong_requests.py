"""Invalid requests are answered if they can be, and do not affect the worker."""

import json
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import msgpack
import pytest

from service.workers.messages import EMBED, GOOD_BODY, GOOD_PARAMS, message
from service.workers.service import QUEUE, Service


def assert_still_serves(service: Service) -> None:
    handle = service.generate(max_tokens=4)
    assert handle.get(timeout=60)["usage"]["completion_tokens"] == 4
    service.wait_settled()
    worker = service.workers[0]
    assert worker.process.poll() is None
    assert worker.metrics()["headrace_requests_in_flight"] == 0


def assert_refused(service: Service, request_id: str, result: dict[str, Any], code: str, *words: str) -> None:
    log = service.stream(request_id)
    assert log.attempts == []
    assert log.end is not None
    assert log.end["finish_reason"] == "rejected"
    assert log.end["error"] == result["error"]
    assert result["outputs"] == []
    assert result["request_id"] == request_id
    assert result["error"]["code"] == code
    for word in words:
        assert word in result["error"]["message"]


def without(odd: dict[str, Any], *path: str) -> dict[str, Any]:
    inner = odd
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return odd


OF_PROTOCOL_1 = {"task": "headrace.generate", "args": [], "kwargs": {"prompt": "x"}, "timelimit": 5}
IN_AN_HOUR = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("kwargs", "code", "words"),
    [
        ({"prompt": "x", "model": "other"}, "model_not_found", ["other", "tiny"]),
        ({"prompt_token_ids": [5] * 3000}, "context_length_exceeded", ["3000", "2048"]),
        ({"prompt": "wheel " * 4000}, "context_length_exceeded", ["2048"]),
        ({"prompt_token_ids": [5, 10**6]}, "invalid_request", ["1000000", "383"]),
        ({"prompt": "x", "sampling_params": {"temperature": -1, "top_p": 7}}, "invalid_request", ["-1", "7"]),
        ({"prompt": "x", "sampling_params": {"warmth": 1}}, "invalid_request", ["warmth"]),
        ({"prompt": "x", "sampling_params": [1]}, "invalid_request", ["sampling_params"]),
        ({"prompt": "x", "sampling_params": {"n": 2, "temperature": 0}}, "invalid_request", ["n must be 1"]),
        ({"prompt_token_ids": []}, "invalid_request", ["prompt_token_ids"]),
        ({}, "invalid_request", ["exactly one"]),
        (None, "invalid_request", ["exactly one"]),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "invalid_request", ["exactly one"]),
        ({"prompt": "x", "colour": "blue"}, "invalid_request", ["colour"]),
        ({"prompt": "x", "lora": "a"}, "invalid_request", ["tiny has no LoRA adapter", "'a'"]),
        ({"prompt": "x", "lora": "../a"}, "invalid_request", ["begin with a letter or digit"]),
        ({"messages": [{"role": "critic", "content": "x"}]}, "invalid_request", ["critics are not served"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "invalid_request",
            ["type must be text, the only supported type"],
        ),
        ({"messages": HI, "chat_template": "{{ 1 }}"}, "invalid_request", ["chat_template must be absent"]),
        ({"messages": HI, "chat_template_kwargs": {"tools": 1}}, "invalid_request", ["tools, which is no variable"]),
        ({"messages": HI, "continue_final_message": True}, "invalid_request", ["add_generation_prompt must be false"]),
        ({"prompt": "x", "tools": [{}]}, "invalid_request", ["tools must be absent without messages"]),
        ({"prompt": "x", "sampling_params": {"extra_args": {"a": [[1]] * 40000}}}, "invalid_request", ["65536 values"]),
        ({"prompt": 5}, "invalid_request", ["prompt"]),
        ({"prompt": b"\xff\xfe"}, "invalid_request", ["prompt"]),
    ],
)
def test_an_invalid_request_is_refused_with_the_reason(
    service: Service, kwargs: Any, code: str, words: list[str]
) -> None:
    handle = service.send(kwargs)
    assert_refused(service, handle.id, handle.get(timeout=60), code, *words)
    assert_still_serves(service)


def test_positional_arguments_that_no_task_of_a_chain_returns_are_refused(service: Service) -> None:
    for kwargs, args, word in (
        ({}, ["a", "b"], "at most one"),
        ({}, [7], "positional"),
        ({"prompt": "a"}, ["b"], "twice"),
    ):
        handle = service.send(kwargs, args=args)
        assert_refused(service, handle.id, handle.get(timeout=60), "invalid_request", word)
    assert_still_serves(service)


@pytest.mark.parametrize(
    "odd",
    [
        message(b"\xc1\xc1 not msgpack"),
        message(msgpack.packb([])),
        message(msgpack.packb([[], ["prompt"], EMBED])),
        message(msgpack.packb([[], {"prompt": "x"}, 9])),
        message(GOOD_BODY, content_type="application/json"),
        message(b"cos\nsystem\n(S'true'\ntR.", content_type="application/x-python-serialize"),
        message(GOOD_BODY, content_type="application/no-such-type"),
        message(msgpack.packb([[], {"prompt": "x"}, {**EMBED, "callbacks": [{"task": "headrace.generate"}]}])),
        message(msgpack.packb([[], {"prompt": "x"}, {**EMBED, "chain": 5}])),
        message(GOOD_BODY, expires="next week"),
        message(GOOD_BODY, timelimit=5),
        message(GOOD_BODY, timelimit="long"),
        message(GOOD_BODY, timelimit=5, eta=IN_AN_HOUR),
        message(GOOD_BODY, timelimit=[1, 2, 3], eta=IN_AN_HOUR),
        message(GOOD_BODY, eta=[]),
        *(
            without(message(msgpack.packb({**OF_PROTOCOL_1, "id": odd})), "headers", "task")
            for odd in (5, True, "", 3.5)
        ),
        message(GOOD_BODY, eta="9999-12-31T23:59:59-14:00"),
        message(GOOD_BODY, eta="yesterday"),
    ],
    ids=lambda odd: "",
)
def test_a_message_that_celery_cannot_read_is_answered_by_its_id(service: Service, odd: dict[str, Any]) -> None:
    request_id = uuid.uuid4().hex  # Celery's backend remembers the result of an id that it has seen
    service.client.lpush(QUEUE, json.dumps(odd).replace("odd-request", request_id))
    service.wait_ended([request_id], timeout=60)
    raw, meta = service.stored(request_id)
    assert (raw[:1] == b"{") is (odd["content-type"] != "application/x-msgpack")
    assert_refused(service, request_id, meta["result"], "invalid_request")
    assert_still_serves(service)
    assert service.inspected("query_task", ids=[request_id]) == {}
    assert service.inspected("reserved") == []


@pytest.mark.parametrize(
    "raw",
    [
        b"null",
        b"{}",
        b"[" * 100_000,
        json.dumps(without(message(GOOD_BODY), "headers", "id")).encode(),
        json.dumps(without(message(GOOD_BODY), "headers", "task")).encode(),
        json.dumps({**message(GOOD_BODY, content_type="application/json"), "headers": {}}).encode(),
        json.dumps(without(message(GOOD_BODY), "properties")).encode(),
        json.dumps(message(GOOD_BODY, request_id=17)).encode(),
        json.dumps(message(GOOD_BODY, request_id="")).encode(),
        json.dumps(message(GOOD_BODY, request_id="x" * 513)).encode(),
        json.dumps(message(GOOD_BODY, request_id="lone \ud83d")).encode(),
        json.dumps(message(GOOD_BODY, id=17, content_encoding="zlib_codec")).encode(),
        json.dumps(message(GOOD_BODY, request_id={"a": 1})).encode(),
        json.dumps(message(GOOD_BODY, request_id=None)).encode(),
        json.dumps(message(GOOD_BODY, task="headrace.unheard_of", id=17)).encode(),
    ],
    ids=lambda raw: "",
)
def test_a_message_without_an_id_becomes_a_dead_letter(service: Service, raw: bytes) -> None:
    service.client.lpush(QUEUE, raw)
    service.wait_until(lambda: service.dead_letters() != [])
    [letter] = service.dead_letters()
    assert letter[b"body"] == raw
    assert_still_serves(service)


@pytest.mark.parametrize(
    "headers",
    [
        {"enqueued_at": "noon"},
        {"enqueued_at": float("nan")},
        {"enqueued_at": float("inf")},
        {"enqueued_at": 10**400},
        {"enqueued_at": -1e300},
        {"enqueued_at": True},
        {"tenant": {"a": [1]}, "idempotency_key": 5},
        {"retries": "many"},
        {"group": "lone \ud83d"},
        {"tenant": "lone \ud83d"},
        {"parent_id": "lone \ud83d"},
        {"group": 10**400, "parent_id": {"a": [1]}},
    ],
    ids=lambda headers: "",
)
def test_invalid_optional_headers_count_as_absent(service: Service, headers: dict[str, Any]) -> None:
    request_id = "odd-headers"
    service.client.delete(f"headrace:stream:{request_id}", f"celery-task-meta-{request_id}")
    service.client.lpush(QUEUE, json.dumps(message(GOOD_BODY, request_id=request_id, **headers)))
    result = service.handle(request_id).get(timeout=60)
    assert result["error"] is None
    assert result["usage"]["completion_tokens"] == 4
    assert_still_serves(service)


def test_a_flood_of_wrong_requests_does_not_delay_good_ones(service: Service) -> None:
    before = service.workers[0].metrics()
    bad = [service.send({"prompt": "", "number": number}) for number in range(40)]
    good = [service.generate(max_tokens=4) for _ in range(20)]
    assert all(handle.get(timeout=60)["error"] is None for handle in good)
    assert all(handle.get(timeout=60)["error"]["code"] == "invalid_request" for handle in bad)
    service.wait_settled()
    after = service.workers[0].metrics()
    rejected = 'headrace_requests_total{outcome="rejected"}'
    assert after[rejected] - before[rejected] == 40


def test_a_stream_key_of_the_wrong_type_fails_only_its_own_request(service: Service) -> None:
    request_id = "no-stream"
    service.client.set(f"headrace:stream:{request_id}", "somebody wrote a string here")
    handle = service.send({"prompt": "x", "sampling_params": GOOD_PARAMS}, task_id=request_id)
    others = [service.generate(max_tokens=20) for _ in range(4)]
    assert handle.get(timeout=60)["error"]["code"] == "engine_error"
    assert all(other.get(timeout=60)["usage"]["completion_tokens"] == 20 for other in others)
    service.client.delete(f"headrace:stream:{request_id}")
    assert_still_serves(service)


def test_a_stream_replaced_by_another_type_ends_only_its_own_request(service: Service) -> None:
    victim = service.generate(max_tokens=1500)
    other = service.generate(max_tokens=400)
    service.wait_tokens([victim.id, other.id], at_least=3)
    service.client.set(f"headrace:stream:{victim.id}", "somebody wrote a string here")
    assert other.get(timeout=60)["usage"]["completion_tokens"] == 400
    assert victim.get(timeout=60)["error"]["code"] == "expired"
    service.client.delete(f"headrace:stream:{victim.id}")
    assert_still_serves(service)


def test_a_message_of_a_wire_format_that_the_worker_does_not_read_is_refused_and_says_which_side_to_upgrade(
    service: Service,
) -> None:
    for value, said in ((2, "upgrade the reader"), (0, "an integer from 1, got 0"), ("1", "a string of length 1")):
        handle = service.send({"prompt": "x", "sampling_params": GOOD_PARAMS}, headers={"wire": value})
        assert_refused(service, handle.id, handle.get(timeout=60), "invalid_request", "wire", said)
    handle = service.send({"prompt": "x", "sampling_params": GOOD_PARAMS}, headers={"wire": 1})
    assert handle.get(timeout=60)["error"] is None
    assert_still_serves(service)
