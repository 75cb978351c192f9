"""Every remote control command of Celery, sent to a real worker by an application that knows only the URL."""

import base64
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from celery.worker.control import Panel

from headrace_workers.celery.commands import REFUSED
from service.workers.service import QUEUE, Service

LONG = {"temperature": 0.0, "max_tokens": 800, "ignore_eos": True}

# What each command is asked, and what stands in the answer. A command that a new Celery brings must be decided here.
WORKS: dict[str, tuple[dict[str, Any], str]] = {
    "report": ({}, "celery:"),
    "conf": ({"with_defaults": True}, "accept_content"),
    "dump_conf": ({}, "accept_content"),
    "query_task": ({"ids": ["nobody"]}, "{}"),
    "clock": ({}, "clock"),
    "hello": ({"from_node": "other@host", "revoked": []}, "revoked"),
    "ping": ({}, "pong"),
    "stats": ({}, "'max-concurrency': 32"),
    "scheduled": ({}, "[]"),
    "dump_schedule": ({}, "[]"),
    "reserved": ({}, "[]"),
    "dump_reserved": ({}, "[]"),
    "active": ({}, "[]"),
    "dump_active": ({"safe": True}, "[]"),
    "revoked": ({}, "["),
    "dump_revoked": ({}, "["),
    "registered": ({}, "headrace.generate"),
    "dump_tasks": ({"taskinfoitems": ["rate_limit"]}, "headrace.generate"),
    "active_queues": ({}, QUEUE),
    "memsample": ({}, ""),
    "memdump": ({}, "rss"),
    "revoke": ({"task_id": ["nobody"]}, "flagged as revoked"),
    "terminate": ({"task_id": ["nobody"], "signal": "TERM"}, "tasks unknown"),
    "revoke_by_stamped_headers": ({"headers": {"stamp": ["nobody"]}}, "flagged as revoked"),
    "enable_events": ({}, "already enabled"),
    "disable_events": ({}, "task events disabled"),
    "heartbeat": ({}, "None"),
    "add_consumer": ({"queue": QUEUE}, "'ok'"),
    "cancel_consumer": ({"queue": "celery"}, f"serves {QUEUE}"),
    "engine_stats": ({}, "slots"),
    "pause": ({}, "paused"),
    "resume": ({}, "resumed"),
    "log_level": ({"level": "INFO"}, "ok"),
}
END_THE_WORKER = {"shutdown", "drain"}  # these have tests of their own


@pytest.fixture
def bare(service: Service) -> Iterator[Celery]:
    with Celery(broker=service.url, set_as_current=False) as app:
        yield app


def ask(app: Celery, command: str, arguments: Any = None) -> Any:
    replies = app.control.broadcast(command, arguments=arguments or {}, reply=True, timeout=60, limit=1)
    assert replies, f"no worker answered {command}"
    [answer] = replies[0].values()
    return answer


def restore(app: Celery) -> None:
    for command in ("enable_events", "resume"):
        ask(app, command)


def test_every_command_of_this_celery_has_a_case_here() -> None:
    assert set(WORKS) | set(REFUSED) | END_THE_WORKER == set(Panel.data)


@pytest.mark.parametrize("command", sorted(WORKS))
def test_a_command_of_celery_answers(service: Service, bare: Celery, command: str) -> None:
    arguments, words = WORKS[command]
    assert words in str(ask(bare, command, arguments))
    restore(bare)


@pytest.mark.parametrize("command", sorted(REFUSED))
def test_a_command_without_a_meaning_here_answers_with_an_error(service: Service, bare: Celery, command: str) -> None:
    answer = ask(bare, command, {"n": 2, "task_name": "headrace.generate", "rate_limit": "1/m", "hard": 1, "max": 5})
    assert answer == {"error": REFUSED[command]}
    assert "not supported" in answer["error"] or "--" in answer["error"] or "start another" in answer["error"]
    assert service.generate(max_tokens=4).get(timeout=60)["error"] is None


def test_a_foreign_queue_is_refused_and_the_worker_continues(service: Service, bare: Celery) -> None:
    answer = ask(bare, "add_consumer", {"queue": "foreign", "exchange_type": "topic", "routing_key": "#"})
    assert QUEUE in answer["error"]
    assert service.generate(max_tokens=4).get(timeout=60)["error"] is None
    assert [queue["name"] for queue in ask(bare, "active_queues")] == [QUEUE]


def test_a_worker_whose_queue_was_cancelled_takes_nothing_and_is_not_ready(
    make_service: Callable[..., Service],
) -> None:
    service = make_service()
    worker = service.start_worker().wait_ready()
    with Celery(broker=service.url, set_as_current=False) as app:
        running = service.send({"prompt": "x", "sampling_params": LONG})
        service.wait_tokens([running.id], at_least=3)
        assert "ok" in ask(app, "cancel_consumer", {"queue": QUEUE})
        assert "ok" in ask(app, "cancel_consumer", {"queue": QUEUE})
        assert worker.health("ready")[0] == 503
        assert ask(app, "active_queues") == []
        waiting = service.generate(max_tokens=4)
        assert running.get(timeout=120)["usage"]["completion_tokens"] == 800
        assert service.queued() == 1
        assert "ok" in ask(app, "add_consumer", {"queue": QUEUE})
        assert waiting.get(timeout=60)["usage"]["completion_tokens"] == 4
        assert worker.health("ready")[0] == 200
        assert "ok" in ask(app, "cancel_consumer", {"queue": QUEUE})
        assert ask(app, "resume") == {"ok": "resumed"}
        assert service.generate(max_tokens=4).get(timeout=60)["error"] is None
        assert worker.health("ready")[0] == 200


def test_a_worker_of_two_queues_may_stop_consuming_one(make_service: Callable[..., Service]) -> None:
    service = make_service()
    worker = service.start_worker(queues="also").wait_ready()
    with Celery(broker=service.url, backend=service.url, set_as_current=False) as app:
        assert "ok" in ask(app, "cancel_consumer", {"queue": QUEUE})
        assert worker.health("ready")[0] == 200
        waiting = service.generate(max_tokens=4)
        kwargs = {"prompt": "x", "sampling_params": {"max_tokens": 2, "ignore_eos": True}}
        served = app.send_task("headrace.generate", kwargs=kwargs, queue="headrace.also")
        assert served.get(timeout=60)["error"] is None
        assert service.queued() == 1
        assert "ok" in ask(app, "add_consumer", {"queue": QUEUE})
        assert waiting.get(timeout=60)["error"] is None


def test_delayed_messages_are_listed_as_scheduled_until_their_eta(service: Service, bare: Celery) -> None:
    later = service.send({"prompt": "Zanzibar"}, countdown=600, priority=3)
    soon = service.send({"prompt": "Zanzibar", "sampling_params": {"max_tokens": 2}}, countdown=300)
    service.wait_until(lambda: len(ask(bare, "scheduled")) == 2)
    answer = ask(bare, "scheduled")
    assert [entry["request"]["id"] for entry in answer] == [soon.id, later.id]
    assert [entry["priority"] for entry in answer] == [0, 3]
    assert all(entry["request"]["type"] == "headrace.generate" and "T" in entry["eta"] for entry in answer)
    assert "Zanzibar" not in str(answer)
    service.client.flushdb()


def test_events_of_tasks_can_be_switched_off_and_on(service: Service, bare: Celery) -> None:
    heard: list[str] = []

    def hear_heartbeats(count: int) -> None:
        """Then the worker has sent what it had to tell before."""
        before = heard.count("worker-heartbeat")
        service.wait_until(lambda: heard.count("worker-heartbeat") >= before + count)

    with bare.connection_for_read() as connection:
        receiver = bare.events.Receiver(connection, handlers={"*": lambda event: heard.append(event["type"])})
        listener = threading.Thread(target=receiver.capture, kwargs={"limit": None}, daemon=True)
        listener.start()
        try:
            hear_heartbeats(1)
            assert ask(bare, "disable_events") == {"ok": "task events disabled"}
            assert ask(bare, "disable_events") == {"ok": "task events already disabled"}
            hear_heartbeats(2)
            disabled_at = len(heard)
            service.generate(max_tokens=2).get(timeout=60)
            service.wait_settled()
            hear_heartbeats(2)
            assert not any(kind.startswith("task-") for kind in heard[disabled_at:])
            assert ask(bare, "enable_events") == {"ok": "task events enabled"}
            service.generate(max_tokens=2).get(timeout=60)
            service.wait_until(lambda: "task-succeeded" in heard[disabled_at:])
        finally:
            receiver.should_stop = True
            listener.join()


def test_a_shutdown_lets_running_requests_finish(make_service: Callable[..., Service]) -> None:
    service = make_service()
    worker = service.start_worker().wait_ready()
    running = service.send({"prompt": "x", "sampling_params": LONG})
    service.wait_tokens([running.id], at_least=3)
    with Celery(broker=service.url, set_as_current=False) as app:
        app.control.shutdown()
    assert worker.wait() == 0
    worker.assert_nothing_left()
    assert running.get(timeout=60)["usage"]["completion_tokens"] == 800


def test_no_answer_contains_a_password(make_service: Callable[..., Service]) -> None:
    service = make_service()
    secret = "Zanzibar-7"
    service.client.execute_command("ACL", "SETUSER", "boss", "on", f">{secret}", "~*", "&*", "+@all")
    url = service.url.replace("redis://", f"redis://boss:{secret}@")
    worker = service.start_worker(redis_url=url).wait_ready()
    with Celery(broker=service.url, set_as_current=False) as app:
        for command in ("conf", "report", "stats", "active_queues", "registered", "engine_stats"):
            arguments = {"with_defaults": True} if command == "conf" else {}
            arguments = {"taskinfoitems": ["backend", "app", "request"]} if command == "registered" else arguments
            assert secret not in str(ask(app, command, arguments)), command
    assert secret not in worker.log_text()


def published(service: Service, body: Any, **changes: Any) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    properties = {"body_encoding": "base64", "delivery_info": {"exchange": "celery.pidbox"}, "delivery_tag": "1"}
    message = {
        "body": base64.b64encode(raw).decode(),
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {"clock": 1},
        "properties": properties,
    }
    return json.dumps(message | changes).encode()


REPLIES = "reply.celery.pidbox"


@pytest.mark.parametrize(
    "raw",
    [
        b"5",
        b"null",
        b"Zanzibar",
        b"\xff\xfe",
        b"[" * 200_000,
        b"{}",
        b'{"properties": {}}',
        b'{"headers": {}, "properties": {"delivery_info": {}}}',
        (5,),
        ([],),
        ({},),
        ({"method": 5},),
        ({"method": "ping", "arguments": [1]},),
        ({"method": "ping", "arguments": {"state": 1}},),
        ({"method": "ping", "destination": 5},),
        ({"method": "ping", "pattern": "(a+)+$", "matcher": "pcre"},),
        ({"method": "ping", "reply_to": {}},),
        ({"method": "ping", "reply_to": {"exchange": "", "routing_key": QUEUE}, "ticket": "t"},),
        ({"method": "ping", "reply_to": {"exchange": REPLIES, "routing_key": "nobody"}},),
        ({"method": "no_such", "reply_to": {"exchange": REPLIES, "routing_key": "nobody"}},),
        ({"method": "revoke", "arguments": {"task_id": [{"a": 1}]}},),
        ({"method": "revoke", "arguments": {"task_id": ["x"] * 5000}},),
        ({"method": "revoke", "arguments": {"task_id": "x", "terminate": True, "signal": "NONE"}},),
        ({"method": "revoke_by_stamped_headers", "arguments": {"headers": ["x"]}},),
        ({"method": "hello", "arguments": {"from_node": "x", "revoked": [{}]}},),
        ({"method": "log_level", "arguments": {"level": 5}},),
        ({"method": "drain", "arguments": {"grace_seconds": "x"}},),
        (b"\x80\x02cos\nsystem\n.", {"content-type": "application/x-python-serialize"}),
        ({"method": "ping"}, {"headers": {"clock": 10**400}}),
        ({"method": "ping"}, {"headers": {"clock": "x"}}),
        ({"method": "ping"}, {"headers": {"compression": "application/x-gzip"}}),
        ({"method": "ping"}, {"content-encoding": "zlib_codec"}),
    ],
    ids=lambda raw: "",
)
def test_no_published_message_ends_the_worker(service: Service, bare: Celery, raw: Any) -> None:
    payload = raw if isinstance(raw, bytes) else published(service, raw[0], **(raw[1] if len(raw) > 1 else {}))
    assert service.client.publish("/0.celery.pidbox", payload) == 1
    assert ask(bare, "ping") == {"ok": "pong"}
    assert ask(bare, "clock")["clock"] < 2**53
    assert service.workers[0].process.poll() is None
    assert "Zanzibar" not in service.workers[0].log_text()
    assert service.queued() == 0


def test_a_command_is_answered_in_its_content_type(service: Service) -> None:
    for serializer in ("json", "msgpack"):
        with Celery(broker=service.url, set_as_current=False) as app:
            app.conf.update(task_serializer=serializer, accept_content=[serializer])
            assert ask(app, "ping") == {"ok": "pong"}
            handle = uuid.uuid4().hex
            assert "flagged" in ask(app, "revoke", {"task_id": handle})["ok"]
        assert (service.stored(handle)[0][:1] == b"{") is (serializer == "json")
