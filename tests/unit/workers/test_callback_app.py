"""The application that builds callbacks: its last check, its limits, and what it does not run itself."""

import base64
import json
from contextlib import suppress
from typing import Any

import pytest
import redis
from celery import Celery
from celery.backends.base import Backend
from celery.canvas import maybe_signature
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace_broker.content import JSON, SERIALIZERS
from headrace_broker.errors import CallbacksTooLargeError
from headrace_broker.queue import final_writes
from headrace_broker.queue.final_writes import FinalWrites
from headrace_broker.queue.worker_port import DeliveryInfo
from headrace_broker.settings import BrokerSettings
from headrace_wire.errors import InvalidRequestError
from headrace_workers.app import _check_callback_servers
from headrace_workers.celery.callback_app import CHORD_SECONDS, Collected, collecting, make_callback_app
from headrace_workers.celery.callbacks import Callbacks, DeadRequest, _context
from headrace_workers.celery.chord_parts import ChordParts
from headrace_workers.errors import WorkerSettingsError
from headrace_workers.preparation.callback_rules import MAX_DEPTH, CallbackRules, Links
from headrace_workers.settings import WorkerSettings

RULES = CallbackRules(("shop.*",), ("celery", "shop"))


# no server is there: nothing here reads a result
WORKER_APP = Celery("worker", backend="redis://127.0.0.1:1/0", set_as_current=False)
WORKER_APP.conf.result_expires = 600
APP = make_callback_app(WORKER_APP, RULES, "json")


@pytest.fixture
def app() -> Celery:
    return APP


EVIL = {"task": "evil", "args": [], "kwargs": {}, "options": {}, "subtask_type": None, "immutable": False}


def writes_of(embed: dict[str, Any], error: dict[str, str] | None, **headers: Any) -> list[tuple[str, str]]:
    """The kinds and keys of the writes of a request with these links."""
    body = json.dumps([[], {"prompt": "x"}, embed])
    request = DeadRequest("r", "headrace.generate", headers, body, JSON, DeliveryInfo(content="c"))
    found = Callbacks(WORKER_APP, RULES).final_writes(request, {"outputs": []} if error is None else {"error": error})
    return [] if found is None else [(kind, key) for kind, key, _, _ in found.writes]


def test_an_errback_that_cannot_be_built_does_not_lose_the_rest_of_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("no")

    monkeypatch.setattr(Backend, "_call_task_errbacks", refuse)
    embed = {"errbacks": [member("shop.store", {})], "chain": [member("shop.store", {"task_id": "next"})]}
    found = writes_of(embed, {"code": "cancelled", "message": "cancelled"})
    assert ("answer", "celery-task-meta-next") in found


@pytest.mark.parametrize("error", [redis.DataError("no"), redis.exceptions.NoPermissionError("no")])
def test_what_redis_refuses_of_a_chord_does_not_return_the_message_for_ever(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(ChordParts, "returned", refuse)
    embed = {"chain": [member("shop.store", {"task_id": "next"})], "chord": member("shop.store", {})}
    assert ("answer", "celery-task-meta-next") in writes_of(embed, None, group="g", group_index=True)


def test_an_outage_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(redis.ConnectionError):
        writes_of({"chord": member("shop.store", {})}, None, group="g")


@pytest.mark.parametrize("root_id", [["x"], "x" * 100_000, None, 7])
def test_a_root_id_that_is_no_id_is_not_passed_on(root_id: Any) -> None:
    links = Links.of({"callbacks": [member("shop.store", {})]})
    request = DeadRequest("r", "headrace.generate", {"root_id": root_id}, b"", JSON, DeliveryInfo())
    assert _context(request, links).root_id == "r"


def test_callbacks_and_queues_on_servers_of_their_own_are_refused_at_the_start() -> None:
    broker = BrokerSettings(queue_urls="m=redis://127.0.0.1:2/0")
    with pytest.raises(WorkerSettingsError, match=r"HEADRACE_CALLBACK_TASKS must be empty.*headrace\.m"):
        _check_callback_servers(WorkerSettings(model="m", callback_tasks="shop.*"), broker)
    _check_callback_servers(WorkerSettings(model="m"), broker)
    _check_callback_servers(WorkerSettings(model="n", callback_tasks="shop.*"), broker)


def test_a_permitted_callback_is_collected(app: Celery) -> None:
    with collecting(app, Collected(RULES, None, JSON)) as writes:
        app.signature("shop.store", queue="shop").apply_async((1,))
    assert [(kind, key) for kind, key, _, _ in writes.writes] == [("push", "shop")]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"headers": {"task": "evil.delete_all"}}, "'evil.delete_all' is not permitted"),
        ({"headers": {"id": "victim"}}, "must be its own"),
        (
            {"exchange": "", "exchange_type": "topic", "routing_key": "headrace:models"},
            "the queue 'headrace:models', which is not permitted",
        ),
        ({"serializer": "yaml"}, "content type"),
        ({"link": [EVIL]}, "'evil' is not permitted"),
        ({"link": [{**EVIL, "task": "shop.store", "options": {"queue": "victim"}}]}, "a queue that is not permitted"),
        ({"link": [{**EVIL, "task": "shop.store", "options": {"exchange": "x"}}]}, "a queue that is not permitted"),
        ({"chord": EVIL}, "'evil' is not permitted"),
        ({"shadow": {"__type__": "decimal", "__value__": "abc"}}, "no worker can read"),
        ({"headers": {"x": {"__type__": "nope", "__value__": 1}}}, "no worker can read"),
    ],
)
def test_the_last_check_does_not_depend_on_how_celery_merges_options(
    app: Celery, options: dict[str, Any], problem: str
) -> None:
    with collecting(app, Collected(RULES, None, JSON)) as writes:
        with pytest.raises(InvalidRequestError, match=problem):
            app.signature("shop.store").apply_async((1,), **options)
        assert not writes.writes


WORDS = st.sampled_from(
    ["shop.store", "evil", "celery.map", "celery", "shop", "headrace:models", "json", "msgpack", "pickle", "victim", ""]
)
NAMES = st.sampled_from(
    (
        *("queue", "exchange", "exchange_type", "routing_key", "headers", "task", "id", "correlation_id", "task_id"),
        *("serializer", "root_id", "group_index", "priority", "stamped_headers", "reply_to", "mark", "expires"),
        *("options", "link", "chain", "chord", "shadow"),
    )
)
VALUES = WORDS | st.integers(-1, 12) | st.lists(NAMES, max_size=3) | st.dictionaries(NAMES, WORDS, max_size=2)
OPTIONS = st.dictionaries(NAMES, VALUES, max_size=5)


def member(task: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"task": task, "args": [], "kwargs": {}, "options": options, "subtask_type": None, "immutable": False}


@given(WORDS, OPTIONS, OPTIONS, st.booleans())
@example("shop.store", {}, {"chord": 0}, True)
@settings(max_examples=300, deadline=None)
def test_whatever_passes_the_rules_sends_only_what_is_permitted(
    task: str, options: dict[str, Any], outer: dict[str, Any], is_group: bool
) -> None:
    signature = member(task, options)
    if is_group:
        signature = {**member("celery.group", outer), "subtask_type": "group", "kwargs": {"tasks": [signature]}}
    try:
        RULES.check({"callbacks": [signature]})
    except InvalidRequestError:
        return
    with collecting(APP, Collected(RULES, None, JSON)) as writes, suppress(Exception):
        maybe_signature(signature, app=APP).apply_async((1,))
    for kind, key, value, _ in writes.writes:
        if kind != "push":  # of a chord
            assert key.startswith("celery-taskset-meta-")
            continue
        message = json.loads(value)
        assert key.split("\x06")[0] in RULES.queues
        assert RULES.permits(message["headers"]["task"])
        assert message["headers"]["id"] == message["properties"]["correlation_id"] != ""
        assert message["content-type"] in SERIALIZERS
        RULES.check_sent(json.loads(base64.b64decode(message["body"]))[2])


def test_the_deepest_permitted_nesting_of_chords_is_built(app: Celery) -> None:
    signature = member("shop.store", {})
    for _ in range(MAX_DEPTH - 1):
        members = {"header": [signature], "body": member("shop.gather", {})}
        signature = {**member("celery.chord", {}), "subtask_type": "chord", "kwargs": members}
    RULES.check({"callbacks": [signature]})
    with collecting(app, Collected(RULES, None, JSON)) as writes:
        maybe_signature(signature, app=app).apply_async((1,))
    assert [key for kind, key, _, _ in writes.writes if kind == "push"] == ["celery"]


def test_parts_of_chords_are_kept_for_a_day(app: Celery) -> None:
    assert app.backend.chord_expires == CHORD_SECONDS == 86_400


def test_no_task_of_celery_runs_in_the_worker(app: Celery) -> None:
    assert list(app.tasks) == []


def test_writes_that_are_cut_or_refused_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final_writes, "MAX_BYTES", 10)
    writes = FinalWrites()
    writes.set("a", b"1234", 0)
    with pytest.raises(CallbacksTooLargeError):
        writes.set("b", b"1234567", 0)
    writes.set("b", b"123456", 0)
    writes.cut(1)
    assert (len(writes), writes.num_bytes) == (1, 4)
    writes.set("b", b"123456", 0)
