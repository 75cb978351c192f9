"""The client against a real server. The tests do the worker's part."""

import base64
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

import msgpack
import pytest
import redis
from celery import Celery

from headrace_broker import (
    BrokerSettings,
    Client,
    GenerateResult,
    InvalidRequestError,
    QueueFullError,
    QueueUnavailableError,
    RequestFailedError,
    RequestStatus,
    ResultTimeoutError,
    StreamExpiredError,
    UnknownModelError,
    Usage,
    make_app,
)
from headrace_broker.client.message_sender import MessageSender
from headrace_broker.keys import MODELS_KEY, queue_lists, stream_key
from headrace_broker.models.registry import RegisteredModel, register_model
from headrace_broker.queue.leases import Leases
from headrace_broker.results import ChoiceOutput, ErrorInfo
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.streams.writer import StreamWrite, StreamWriter
from headrace_wire.wire_number import WIRE_NUMBER
from service.servers import make_server

STORES_RESULTS = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")  # Celery's own
RESULT = GenerateResult("r", [ChoiceOutput(0, "hi", [7], finish_reason="stop")], Usage(1, 0, 1))


@pytest.fixture
def client(redis_server: EmbeddedServer) -> Iterator[Client]:
    with Client(redis_server.url, model="m") as client:
        yield client


@pytest.fixture
def writer(redis_client: "redis.Redis") -> StreamWriter:
    return StreamWriter(redis_client, 60)


def queued(client: "redis.Redis", model: str = "m", step: int = 0) -> list[dict[str, Any]]:
    """Return the messages of a queue, oldest first, with their bodies decoded."""
    messages = [json.loads(raw) for raw in reversed(client.lrange(queue_lists(f"headrace.{model}")[step], 0, -1))]
    for message in messages:
        message["body"] = msgpack.unpackb(base64.b64decode(message["body"]))
    return messages


def shape(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message without the headers that differ for every message, and those that only our client writes."""
    changing = ("id", "root_id", "enqueued_at", "prefix", "wire")
    headers = {key: value for key, value in message["headers"].items() if key not in changing}
    properties = {
        key: value
        for key, value in message["properties"].items()
        # send_task also copies the last two into the properties, where nothing reads them
        if key not in ("correlation_id", "delivery_tag", "reply_to", "argsrepr", "kwargsrepr")
    }
    return {**message, "headers": headers, "properties": properties}


def test_a_message_equals_that_of_a_plain_celery_producer(
    client: Client, redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    stock = Celery("producer", broker=redis_server.url, set_as_current=False)
    stock.conf.update(task_serializer="msgpack", accept_content=["msgpack"])
    kwargs = {"prompt": "Hello", "sampling_params": {"max_tokens": 5}}
    stock.send_task(
        "headrace.generate", kwargs=kwargs, queue="headrace.m", argsrepr="", kwargsrepr="", ignore_result=False
    )
    stock.close()
    client.submit("Hello", {"max_tokens": 5})
    theirs, ours = queued(redis_client)
    assert shape(ours) == shape(theirs)
    assert ours["body"][1] == kwargs
    assert "enqueued_at" in ours["headers"]
    assert ours["headers"]["wire"] == WIRE_NUMBER


def test_the_fields_that_the_queue_uses_are_outside_the_body(client: Client, redis_client: "redis.Redis") -> None:
    deadline = datetime(2050, 1, 1, tzinfo=UTC)
    with pytest.raises(InvalidRequestError):
        client.submit("x", expires=deadline)
    request_id = client.submit("x", priority=7, expires=90, tenant="t", idempotency_key="k", request_id="my-own")
    assert request_id == "my-own"
    (message,) = queued(redis_client, step=2)  # priority 7 belongs to the step that begins at 6
    headers = message["headers"]
    assert headers["id"] == message["properties"]["correlation_id"] == "my-own"
    assert (headers["tenant"], headers["idempotency_key"], message["properties"]["priority"]) == ("t", "k", 7)
    expires = datetime.fromisoformat(headers["expires"]).timestamp()
    assert expires - headers["enqueued_at"] == pytest.approx(90, abs=0.001)


def test_no_copy_of_the_prompt_is_readable_in_the_message(client: Client, redis_client: "redis.Redis") -> None:
    client.submit("a secret prompt", {"stop": "a secret stop"})
    (raw,) = redis_client.lrange("headrace.m", 0, -1)
    assert b"secret" not in raw


def test_submitting_creates_only_the_message(client: Client, redis_client: "redis.Redis") -> None:
    client.submit("x")
    assert redis_client.keys("*") == [b"headrace.m"]
    assert redis_client.pubsub_channels() == []


def test_submitting_costs_one_command(redis_server: EmbeddedServer, redis_client: "redis.Redis") -> None:
    with Client(redis_server.url, model="m", check_model=False) as client:
        client.submit("the first one also connects")
        redis_client.config_resetstat()
        client.submit("x")
        client.submit("y")
        assert redis_client.info("commandstats")["cmdstat_lpush"]["calls"] == 2
        assert redis_client.info("stats")["total_commands_processed"] <= 4  # two of them are the test's own INFO calls


def test_many_requests_are_queued_in_order(client: Client, redis_client: "redis.Redis") -> None:
    ids = client.submit_many(
        [{"prompt": str(number), "model": "other" if number % 2 else "m"} for number in range(450)]
    )
    assert len(set(ids)) == 450
    for model, first in (("m", 0), ("other", 1)):
        messages = queued(redis_client, model)
        assert [message["body"][1]["prompt"] for message in messages] == [str(n) for n in range(first, 450, 2)]
        assert [message["headers"]["id"] for message in messages] == ids[first::2]


def test_one_invalid_request_among_many_sends_none(client: Client, redis_client: "redis.Redis") -> None:
    with pytest.raises(InvalidRequestError, match="request 1: prompt must be"):
        client.submit_many([{"prompt": "x"}, {"prompt": 5}])
    assert redis_client.keys("*") == []


def test_a_model_that_was_never_served_is_refused_if_others_were(client: Client, redis_client: "redis.Redis") -> None:
    client.submit("nobody is registered yet, so anything goes")
    register_model(redis_client, "big", max_model_len=4096, worker="w@1", seen=12.5)
    register_model(redis_client, "small", max_model_len=512, worker="w@2", seen=13.5)
    with pytest.raises(UnknownModelError, match="known models: big, small"):
        client.submit("x", model="tiny")
    client.submit("x", model="big")
    assert client.models()["big"] == RegisteredModel("big", 4096, 12.5, "w@1", created=12.5)
    redis_client.hset(MODELS_KEY, "strange", b"\xc1")
    assert client.models().keys() == {"big", "small"}


def test_the_model_check_can_be_switched_off(redis_server: EmbeddedServer, redis_client: "redis.Redis") -> None:
    register_model(redis_client, "big", max_model_len=4096, worker="w", seen=1)
    with Client(redis_server.url, model="coming-soon", check_model=False) as client:
        client.submit("x")
    assert len(queued(redis_client, "coming-soon")) == 1


def test_a_stream_is_read_left_and_resumed(client: Client, writer: StreamWriter) -> None:
    writer.claim("r", "w")
    texts = ["Once", " upon", " a", " time"]
    writer.publish(
        [
            *(StreamWrite.chunk("r", 1, n + 1, index=0, token_ids=[n], text=text) for n, text in enumerate(texts)),
            StreamWrite.end("r", 1, 4, finish_reason="stop"),
        ]
    )
    stream = client.stream("r")
    first = next(stream)
    stream.close()
    assert [first.text, *(chunk.text for chunk in client.stream("r", last_id=first.entry_id))] == texts


def test_a_failed_request_raises_after_its_chunks(client: Client, writer: StreamWriter) -> None:
    writer.claim("r", "w")
    error = ErrorInfo("engine_error", "the engine died twice")
    writer.publish(
        [
            StreamWrite.chunk("r", 1, 1, index=0, token_ids=[1], text="Once"),
            StreamWrite.end("r", 1, 1, finish_reason="error", error=error),
        ]
    )
    stream = client.stream("r")
    assert next(stream).text == "Once"
    with pytest.raises(RequestFailedError, match="engine_error: the engine died twice"):
        next(stream)
    assert len(list(client.events("r"))) == 3


def test_a_silent_stream_times_out_and_an_expired_one_raises(client: Client) -> None:
    with pytest.raises(ResultTimeoutError, match=r"no stream entry within 0\.01 s"):
        next(client.stream("r", timeout=0.01))
    with pytest.raises(StreamExpiredError):
        next(client.stream("r", last_id="1-5"))


@STORES_RESULTS
def test_a_result_is_read_as_celery_stored_it(client: Client, redis_server: EmbeddedServer) -> None:
    worker = make_app(client.settings)
    worker.backend.store_result("r", RESULT.to_wire(), "SUCCESS")
    assert client.result("r", timeout=5) == RESULT
    assert worker.AsyncResult("r").get(timeout=5) == RESULT.to_wire()
    with pytest.raises(ResultTimeoutError):
        client.result("unknown", timeout=0.01)
    worker.backend.store_result("failed", RuntimeError("boom"), "FAILURE")
    with pytest.raises(RequestFailedError, match="engine_error: RuntimeError: boom"):
        client.result("failed", timeout=5)
    worker.close()


def test_a_request_can_be_cancelled_once_in_every_state(client: Client, writer: StreamWriter) -> None:
    assert client.cancel("queued")
    assert client.cancel("queued")
    assert writer.claim("queued", "w").ended is not None
    assert client.status("queued") == RequestStatus("finished", 1, 0, "cancelled")
    with pytest.raises(RequestFailedError, match="cancelled"):
        list(client.stream("queued"))

    writer.claim("running", "w")
    writer.publish([StreamWrite.chunk("running", 1, 3, index=0, token_ids=[1, 2, 3], text="x")])
    assert client.cancel("running")
    assert client.status("running") == RequestStatus("finished", 2, 3, "cancelled")

    writer.claim("finished", "w")
    writer.publish([StreamWrite.end("finished", 1, 0, finish_reason="stop")])
    assert not client.cancel("finished")


def test_the_status_follows_the_request(client: Client, writer: StreamWriter, redis_client: "redis.Redis") -> None:
    assert client.status("r") == RequestStatus("pending")
    writer.claim("r", "w")
    assert client.status("r") == RequestStatus("running", 1, 0)
    writer.publish([StreamWrite.chunk("r", 1, 4, index=0, token_ids=[1, 2, 3, 4], text="x")])
    writer.claim("r", "w2")
    assert client.status("r") == RequestStatus("running", 2, 4)
    writer.publish([StreamWrite.end("r", 2, 4, finish_reason="length")])
    assert client.status("r") == RequestStatus("finished", 2, 4, "length")
    redis_client.delete(stream_key("r"))
    assert client.status("r") == RequestStatus("pending")


def test_an_unreachable_server_is_named_without_its_password(redis_server: EmbeddedServer) -> None:
    with make_server() as server:
        url = server.url
    with Client(url.replace("redis://", "redis://:hunter2@"), model="m", check_model=False) as client:
        for action in (lambda: client.submit("x"), lambda: client.status("r"), lambda: next(client.stream("r"))):
            with pytest.raises(QueueUnavailableError, match=url) as refusal:
                action()
            assert "hunter2" not in str(refusal.value)


def test_the_same_idempotency_key_returns_the_same_request(client: Client, redis_client: "redis.Redis") -> None:
    first = client.submit("x", {"seed": 1, "top_p": 0.5}, idempotency_key="k")
    assert client.submit("x", {"top_p": 0.5, "seed": 1}, idempotency_key="k", priority=3) == first
    assert len(queued(redis_client)) == 1
    other = {client.submit("x", idempotency_key="other"), client.submit("x", idempotency_key="k", tenant="t")}
    assert len({first, *other}) == 3
    assert len(queued(redis_client)) == 3


def test_an_idempotency_key_of_another_request_is_refused(client: Client, redis_client: "redis.Redis") -> None:
    first = client.submit("x", idempotency_key="k")
    with pytest.raises(InvalidRequestError, match="'k' was used with another prompt") as refusal:
        client.submit("y", idempotency_key="k")
    assert first not in str(refusal.value), "who knows the id can read the other's stream"
    assert len(queued(redis_client)) == 1


def test_a_tenant_cannot_take_the_idempotency_key_of_another(client: Client, redis_client: "redis.Redis") -> None:
    taken = client.submit("mine", idempotency_key="k", tenant="a:b")
    ids = [client.submit("x", idempotency_key="k", tenant=tenant) for tenant in ("a", "a:", "a*", "b", "A:b")]
    ids.append(client.submit("x", idempotency_key="k"))
    assert len({taken, *ids}) == 7
    keys = [key.decode() for key in redis_client.scan_iter("headrace:idempotency:*")]
    # an ACL rule of Redis for one tenant's keys matches no other tenant's keys
    assert len([key for key in keys if fnmatchcase(key, "headrace:idempotency:a:*")]) == 1
    assert len([key for key in keys if fnmatchcase(key, "headrace:idempotency:a%3Ab:*")]) == 1


def test_a_used_request_id_is_refused_and_its_result_unchanged(
    client: Client, writer: StreamWriter, redis_client: "redis.Redis"
) -> None:
    writer.claim("running", "w")
    writer.claim("ended", "w")
    writer.publish([StreamWrite.end("ended", 1, 0, finish_reason="stop")])
    redis_client.set("celery-task-meta-stored", b"x")
    for used in ("running", "ended", "stored"):
        with pytest.raises(InvalidRequestError, match=f"request_id '{used}' was used"):
            client.submit("y", request_id=used)
        with pytest.raises(InvalidRequestError, match=f"request_id '{used}' was used"):
            client.submit_many([{"prompt": "y"}, {"prompt": "y", "request_id": used, "idempotency_key": "k"}])
    assert queued(redis_client) == []
    assert client.submit("y", request_id="fresh", idempotency_key="k") == "fresh"
    writer.claim("fresh", "w")
    assert client.submit("y", request_id="fresh", idempotency_key="k") == "fresh", "the key says that it is the same"
    assert len(queued(redis_client)) == 1


def test_a_client_without_the_right_to_read_streams_can_submit(client: Client, redis_client: "redis.Redis") -> None:
    redis_client.acl_setuser(
        "sender",
        enabled=True,
        passwords=["+word"],
        keys=["headrace.*", "_kombu.*", "headrace:models"],
        commands=["+@all", "-@dangerous", "+info"],
    )
    url = client.settings.redis_url.replace("redis://", "redis://sender:word@")
    try:
        with Client(url, model="m") as sender:
            assert sender.submit("y", request_id="r") == "r"
    finally:
        redis_client.acl_deluser("sender")


def test_many_requests_with_idempotency_keys_are_sent_once_each(client: Client, redis_client: "redis.Redis") -> None:
    first = client.submit("x", idempotency_key="a")
    ids = client.submit_many(
        [{"prompt": "x", "idempotency_key": key} for key in ("a", "b", "b")] + [{"prompt": "x"}, {"prompt": "x"}]
    )
    assert ids[0] == first
    assert ids[1] == ids[2]
    assert len(set(ids)) == 4
    assert len(queued(redis_client)) == 4


def test_a_failed_submission_is_repeated_under_the_same_id(
    client: Client, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **_options: Any) -> None:
        raise redis.ConnectionError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(MessageSender, "send", fail)
        with pytest.raises(QueueUnavailableError):
            client.submit("x", idempotency_key="k", request_id="first")
    assert client.submit("x", idempotency_key="k") == "first"
    assert client.submit("x", idempotency_key="k") == "first"
    assert len(queued(redis_client)) == 1


@pytest.fixture
def bounded(redis_server: EmbeddedServer) -> Iterator[Client]:
    with Client(BrokerSettings(redis_url=redis_server.url, max_queued_requests=3), model="m") as client:
        yield client


def test_a_full_queue_refuses_requests_and_says_when_to_retry(
    bounded: Client, client: Client, redis_client: "redis.Redis"
) -> None:
    bounded.submit_many([{"prompt": "x", "priority": priority} for priority in (0, 5, 9)])
    with pytest.raises(QueueFullError, match="the queue of m is full: it holds 3 of at most 3") as full:
        bounded.submit("x")
    assert full.value.retry_after_seconds is None  # no worker has read the queue yet
    Leases(redis_client, lease_seconds=60, delivery_limit=5).fetch(queue_lists("headrace.m"), 0)
    with pytest.raises(QueueFullError) as full:
        bounded.submit("x")
    assert full.value.retry_after_seconds is not None
    assert full.value.retry_after_seconds >= 1
    bounded.submit("x", model="other")
    client.submit("x")  # the limit is a setting of each client
    with pytest.raises(QueueFullError):
        bounded.submit("x", idempotency_key="k", request_id="first")
    Leases(redis_client, lease_seconds=60, delivery_limit=5).purge(queue_lists("headrace.m"))
    redis_client.delete(*queue_lists("headrace.m"))
    assert bounded.submit("x", idempotency_key="k") == "first"


def test_delayed_messages_count_towards_the_limit(bounded: Client, client: Client, redis_client: "redis.Redis") -> None:
    client.submit_many([{"prompt": "x"}] * 3)
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=5)
    later, now, _held = leases.fetch(queue_lists("headrace.m"), 3)
    for message in (later, now):
        leases.postpone(message.lease_id, 3000)
    bounded.submit("x")
    with pytest.raises(QueueFullError, match="it holds 3 of at most 3"):
        bounded.submit("x")


def test_submit_many_sends_all_requests_or_none(bounded: Client, redis_client: "redis.Redis") -> None:
    with pytest.raises(QueueFullError):
        bounded.submit_many([{"prompt": "x"}] * 4)
    assert queued(redis_client) == []
    assert len(bounded.submit_many([{"prompt": "x"}] * 3)) == 3
