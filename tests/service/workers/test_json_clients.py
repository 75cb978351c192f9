"""Clients that use JSON, Celery's default, are served and can read every answer."""

import base64
import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError

from headrace_broker.client.client import Client
from headrace_broker.results import RequestFailedError
from service.workers.messages import message
from service.workers.service import QUEUE, Service

PARAMS = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
LONG = {**PARAMS, "max_tokens": 2000}

# a producer that uses only plain Celery
PRODUCER = """
import json, sys
from celery import Celery

app = Celery(broker=sys.argv[1], backend=sys.argv[1])
kwargs = {"prompt": "hello", "sampling_params": {"max_tokens": 4, "ignore_eos": True, "logit_bias": {"7": 1.5}}}
good = app.send_task("headrace.generate", kwargs=kwargs, queue="headrace.tiny", priority=6)
bad = app.send_task("headrace.generate", kwargs={"prompt": 5}, queue="headrace.tiny")
print(json.dumps([good.get(timeout=100), bad.get(timeout=100)]))
"""


@pytest.fixture
def plain(service: Service) -> Iterator[Celery]:
    """Make an application of Celery with its default settings."""
    with Celery(broker=service.url, backend=service.url, set_as_current=False) as app:
        yield app


def send(app: Celery, kwargs: Any, **options: Any) -> Any:
    return app.send_task("headrace.generate", kwargs=kwargs, queue=QUEUE, **options)


def push(service: Service, body: bytes | str, **changes: Any) -> str:
    """Push a message that no Celery client would write, and return its id."""
    request_id = uuid.uuid4().hex
    encoded = {"content_type": "application/json", "content_encoding": "utf-8", **changes}
    raw = message(body.encode() if isinstance(body, str) else body, request_id=request_id, **encoded)
    service.client.lpush(QUEUE, json.dumps(raw))
    return request_id


def in_json(service: Service, request_id: str) -> dict[str, Any]:
    """Get the stored result, and assert that it is JSON."""
    raw, meta = service.stored(request_id)
    assert raw[:1] == b"{"
    assert meta["task_id"] == request_id
    return dict(meta)


def test_a_producer_with_default_settings_gets_its_result_and_its_error(service: Service) -> None:
    producer = subprocess.run(
        [sys.executable, "-c", PRODUCER, service.url], capture_output=True, timeout=120, check=False
    )
    assert producer.returncode == 0, producer.stderr.decode()[-2000:] + service.logs()
    good, bad = json.loads(producer.stdout)
    assert good["usage"]["completion_tokens"] == 4
    assert bad["error"]["code"] == "invalid_request"
    service.wait_settled()
    assert service.dead_letters() == []


@pytest.mark.parametrize("serializer", ["json", "msgpack"])
@pytest.mark.parametrize("protocol", [1, 2])
def test_both_protocols_are_served_in_both_content_types(service: Service, protocol: int, serializer: str) -> None:
    with Celery(broker=service.url, backend=service.url, set_as_current=False) as app:
        app.conf.update(
            task_protocol=protocol,
            task_serializer=serializer,
            result_serializer=serializer,
            accept_content=[serializer],
        )
        good = send(app, {"prompt": "hello", "sampling_params": PARAMS}, headers={"tenant": "acme"})
        assert good.get(timeout=60)["usage"]["completion_tokens"] == 4
        expired = send(app, {"prompt": "hello"}, expires=datetime.now(UTC) - timedelta(seconds=1))
        with pytest.raises(TaskRevokedError):
            expired.get(timeout=60)
        linked = send(app, {"prompt": "hello"}, link=app.signature("other.task", queue="elsewhere"))
        assert "HEADRACE_CALLBACK_QUEUES" in linked.get(timeout=60)["error"]["message"]
        service.wait_settled()
        assert service.client.exists("elsewhere") == 0


def test_a_request_revoked_while_it_runs_or_waits_is_revoked_in_its_content_type(
    plain: Celery, service: Service
) -> None:
    running = send(plain, {"prompt": "x", "sampling_params": LONG})
    service.wait_tokens([running.id], at_least=3)
    plain.control.revoke(running.id, terminate=True)
    with pytest.raises(TaskRevokedError):
        running.get(timeout=60)
    assert in_json(service, running.id)["status"] == "REVOKED"
    later = send(plain, {"prompt": "x"}, countdown=3600)
    service.wait_until(lambda: service.leased() == 1)
    plain.control.revoke(later.id)
    with pytest.raises(TaskRevokedError):
        later.get(timeout=60)
    assert service.stream(running.id).end["finish_reason"] == "cancelled"  # type: ignore[index]
    service.client.delete(*service.client.keys("headrace:lease:*"), *service.client.keys("headrace:queue:*"))


def test_a_dead_letter_is_answered_in_the_content_type_of_its_message(service: Service) -> None:
    compressed = push(service, "[[], {}, {}]", compression="application/x-gzip")
    result = in_json(service, compressed)["result"]
    assert result["error"]["code"] == "dead_letter"
    assert "compressed" in result["error"]["message"]
    unknown = push(service, "[[], {}, {}]", task="headrace.embed")
    assert "headrace.generate" in in_json(service, unknown)["result"]["error"]["message"]
    assert "REVOKED" not in str(service.stored(unknown))


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/x-yaml", "[[], {prompt: Zanzibar}, {}]"),
        ("application/x-python-serialize", b"cos\nsystem\n(S'Zanzibar'\ntR."),
        ("text/plain", "Zanzibar"),
        ("application/data", "Zanzibar"),
    ],
)
def test_another_content_type_is_refused_by_name(service: Service, content_type: str, body: bytes | str) -> None:
    result = in_json(service, push(service, body, content_type=content_type))["result"]
    assert result["error"]["code"] == "invalid_request"
    for word in (content_type, "application/json", "application/x-msgpack"):
        assert word in result["error"]["message"]
    service.wait_until(lambda: service.dead_letters() != [])
    [letter] = service.dead_letters()
    assert letter[b"reason"].decode().startswith("rejected: ")
    assert content_type in letter[b"reason"].decode()
    worker = service.workers[0]
    [refusal] = [line for line in worker.log_lines() if line.get("event") == "message refused"][-1:]
    assert refusal["content_type"] == content_type
    assert (refusal["content_encoding"], refusal["bytes"], refusal["queue"]) == ("utf-8", len(body), QUEUE)
    assert "Zanzibar" not in worker.log_text()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('[[], {"prompt": "x"', "application/json"),
        ("[" * 100_000, "application/json"),
        ('[[], {"prompt": "x", "sampling_params": {"seed": ' + "9" * 5000 + "}}, {}]", "application/json"),
        ('{"prompt": "x"}', "protocol 2"),
        ('[[], "prompt", {}]', "protocol 2"),
        ('[[], {"prompt": "\\ud800"}, {}]', "lone surrogate"),
        ('[[], {"prompt": "x", "sampling_params": {"stop": ["\\ud800"]}}, {}]', "lone surrogate"),
        ('[[], {"prompt": "x", "sampling_params": {"\\ud800": 1}}, {}]', "ud800"),
        ('[[], {"prompt": {"__type__": "bytes", "__value__": "x"}}, {}]', "prompt must be a string"),
        ('[[], {"prompt": "x", "sampling_params": {"temperature": NaN}}, {}]', "temperature"),
        ('[[], {"prompt": "x", "sampling_params": {"temperature": 1e999}}, {}]', "temperature"),
        ('[[], {"prompt": "x", "sampling_params": {"seed": 18446744073709551616}}, {}]', "seed"),
        ('[[], {"prompt": "x", "sampling_params": {"seed": 1.8e19}}, {}]', "seed"),
        ('[[], {"prompt": "x", "sampling_params": {"logit_bias": {"7": 1e400}}}, {}]', "logit_bias"),
        ('[[], {"prompt": "x", "sampling_params": {"logit_bias": {"x": 1}}}, {}]', "logit_bias"),
        ('[[], {"prompt_token_ids": [' + "9" * 30 + "]}, {}]", "prompt_token_ids"),
        ('[[], {"prompt": "x", "sampling_params": {"stop_token_ids": [' + "9" * 30 + "]}}, {}]", "stop_token_ids"),
        ('[[], {"prompt": "x", "sampling_params": {"max_tokens": ' + "9" * 30 + "}}, {}]", "max_tokens"),
        ('[[], {"prompt": "x", "model": "\\ud800"}, {}]', "model"),
        ('[[], {"prompt": "x", "sampling_params": {"structured_outputs": {"regex": "\\ud800"}}}, {}]', "regex"),
        ('[[], {"prompt": "x", "sampling_params": {"structured_outputs": {"choice": ["\\ud800"]}}}, {}]', "choice"),
        ('[[], {"prompt": "x", "sampling_params": {"structured_outputs": {"json": {"enum": ["\\ud800"]}}}}, {}]', ""),
        ('[[], {"prompt": "x", "sampling_params": {"extra_args": {"a": ' + "9" * 30 + "}}}, {}]", "extra_args"),
        ('[[], {"messages": [{"role": "user", "content": "\\ud800"}]}, {}]', "lone surrogate"),
    ],
    ids=lambda value: "",
)
def test_values_that_only_json_can_hold_are_refused_by_name(service: Service, body: str, words: str) -> None:
    result = in_json(service, push(service, body))["result"]
    assert result["error"]["code"] == "invalid_request", result
    assert words in result["error"]["message"]
    service.wait_settled()
    assert service.workers[0].process.poll() is None


def test_values_that_json_and_msgpack_write_differently_mean_the_same(service: Service) -> None:
    bias = {"7": 100}
    first = json.dumps([[], {"prompt": "x", "sampling_params": {**PARAMS, "logit_bias": bias}}, {}])
    result = in_json(service, push(service, first))["result"]
    assert result["outputs"][0]["token_ids"] == [7, 7, 7, 7]
    seeded = json.dumps([[], {"prompt": "x", "sampling_params": {"max_tokens": 8, "seed": 2**63 - 1}}, {}])
    once, again = (in_json(service, push(service, seeded))["result"]["outputs"] for _ in range(2))
    assert once == again
    text = push(service, b"", content_type="application/json")
    service.wait_ended([text])


def test_the_body_may_be_plain_text_in_the_message(service: Service) -> None:
    for encoding in (None, "utf-8"):
        request_id = uuid.uuid4().hex
        raw = message(b"", request_id=request_id, content_type="application/json", content_encoding="utf-8")
        raw["body"] = json.dumps([[], {"prompt": "é", "sampling_params": PARAMS}, {}], ensure_ascii=False)
        raw["properties"]["body_encoding"] = encoding
        service.client.lpush(QUEUE, json.dumps(raw))
        assert in_json(service, request_id)["result"]["usage"]["completion_tokens"] == 4


def test_a_message_with_only_the_required_fields_is_served(service: Service) -> None:
    request_id = uuid.uuid4().hex
    body = json.dumps([[], {"prompt": "x", "sampling_params": PARAMS}, {}]).encode()
    raw = {
        "body": base64.b64encode(body).decode(),
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {"task": "headrace.generate", "id": request_id},
        "properties": {"body_encoding": "base64", "delivery_info": {}},
    }
    service.client.lpush(QUEUE, json.dumps(raw))
    assert in_json(service, request_id)["result"]["usage"]["completion_tokens"] == 4


def test_our_own_client_reads_the_result_of_a_json_request(plain: Celery, service: Service) -> None:
    params = {**PARAMS, "logprobs": 2, "prompt_logprobs": 1}
    good = send(plain, {"prompt": "x", "sampling_params": params})
    bad = send(plain, {"prompt": "x", "colour": 1})
    with Client(service.url) as client:
        assert client.result(good.id, timeout=60).outputs[0].logprobs is not None
        with pytest.raises(RequestFailedError, match="colour"):
            client.result(bad.id, timeout=60)


def test_garbage_under_a_results_key_does_not_prevent_the_result(service: Service) -> None:
    request_id = uuid.uuid4().hex
    service.client.set(f"celery-task-meta-{request_id}", b"\xc1 garbage", ex=60)
    handle = service.send({"prompt": "x", "sampling_params": PARAMS}, task_id=request_id)
    service.wait_ended([handle.id])
    service.wait_settled()
    assert service.stored(request_id)[1]["result"]["usage"]["completion_tokens"] == 4


def test_a_json_request_that_outlives_its_worker_is_answered_in_json(make_service: Callable[..., Service]) -> None:
    service = make_service()
    service.start_worker(lease_seconds=1).wait_ready()
    request_id = push(service, json.dumps([[], {"prompt": "x", "sampling_params": LONG}, {}]))
    service.wait_tokens([request_id], at_least=3)
    service.workers[0].kill()
    service.start_worker(lease_seconds=1)
    assert in_json(service, request_id)["result"]["usage"]["completion_tokens"] == 2000
    assert len(service.stream(request_id).attempts) == 2
