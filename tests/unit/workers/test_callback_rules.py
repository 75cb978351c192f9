"""The allow-list of callbacks: what a message may start, and what a hostile one may not."""

import json
from typing import Any

import msgpack
import pytest
from celery import Celery, chain, chord, group
from kombu.utils.json import dumps

from headrace_broker.content import JSON, MSGPACK
from headrace_wire.errors import InvalidRequestError
from headrace_workers.preparation.arguments import keyword_arguments
from headrace_workers.preparation.callback_rules import MAX_BODY_BYTES, CallbackRules, queue_problem

NONE: dict[str, Any] = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
RULES = CallbackRules(("shop.*", "headrace.generate"), ("celery", "shop"))
APP = Celery("producer", backend="cache+memory://", set_as_current=False)


def task(name: str = "shop.store", **options: Any) -> dict[str, Any]:
    return {"task": name, "args": [], "kwargs": {}, "options": options, "subtask_type": None, "immutable": False}


def nested(depth: int) -> dict[str, Any]:
    signature = task()
    for _ in range(depth):
        signature = task(link=[signature])
    return signature


@pytest.mark.parametrize("place", ["callbacks", "errbacks", "chain"])
def test_permitted_tasks_pass_and_others_are_named_with_the_setting(place: str) -> None:
    RULES.check({**NONE, place: [task(), task("shop.refund", queue="shop", priority=3, serializer="msgpack")]})
    with pytest.raises(
        InvalidRequestError, match=r"'os.system' is not permitted.*HEADRACE_CALLBACK_TASKS permits shop"
    ):
        RULES.check({**NONE, place: [task("os.system")]})


def test_without_a_setting_every_link_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"'shop.store' is not permitted: .*HEADRACE_CALLBACK_TASKS is empty"):
        CallbackRules().check({**NONE, "callbacks": [task()]})


def test_what_celery_makes_of_groups_chains_and_chords_passes() -> None:
    store = APP.signature("shop.store")
    signatures = [
        group(store, store, app=APP),
        chain(store, group(store, APP.signature("shop.x", queue="shop"), app=APP), store, app=APP),
        chord([store, chain(store, store, app=APP)], APP.signature("shop.body"), app=APP),
    ]
    for signature in signatures:
        signature.freeze()
        RULES.check({**NONE, "chain": [json.loads(dumps(signature))]})


@pytest.mark.parametrize(
    ("links", "problem"),
    [
        ({"callbacks": [nested(1000)]}, "nested at most 8 deep"),
        ({"callbacks": [task()] * 100_000}, "at most 1000 callbacks in all"),
        ({"callbacks": [task(link=[task() for _ in range(50)]) for _ in range(50)]}, "at most 1000 callbacks in all"),
        ({"callbacks": [task(link=[task("os.system")])]}, "'os.system' is not permitted"),
        ({"chord": task("os.system")}, "'os.system' is not permitted"),
        (
            {"callbacks": [task(exchange="headrace:lease:leases:headrace.m")]},
            "the option 'exchange', which is not served",
        ),
        ({"callbacks": [task(routing_key="other")]}, "the option 'routing_key', which is not served"),
        ({"callbacks": [task(queue="headrace:models")]}, "queue of the callback 'shop.store' must be a queue of the"),
        ({"callbacks": [task(queue="headrace.other")]}, "HEADRACE_CALLBACK_QUEUES"),
        ({"callbacks": [task(queue={"name": "x"})]}, "HEADRACE_CALLBACK_QUEUES"),
        ({"callbacks": [task(reply_to="headrace.m")]}, "reply_to of the callback 'shop.store' must be a UUID"),
        ({"callbacks": [task(serializer="pickle")]}, "serializer of the callback 'shop.store' must be json or msgpack"),
        ({"callbacks": [task(compression="bzip2")]}, "the option 'compression', which is not served"),
        ({"callbacks": [task(producer=1)]}, "the option 'producer', which is not served"),
        ({"callbacks": [task(task_id="x" * 100_000)]}, "task_id of the callback 'shop.store' must be an id"),
        ({"callbacks": [task(priority=10**9)]}, "priority of the callback 'shop.store' must be 0 to 9"),
        ({"callbacks": [task(stamped_headers="queue")]}, "stamps, here of the callback"),
        ({"callbacks": [task(headers=[1])]}, "headers of the callback 'shop.store' must be a map"),
        ({"callbacks": [{**task(), "subtask_type": "xmap"}]}, "must be a task, group, chain or chord"),
        ({"callbacks": [{**task(), "subtask_type": "group", "kwargs": {"tasks": [task()]}}]}, "must be a task, group"),
        ({"callbacks": [{**task("celery.group"), "subtask_type": ["group"]}]}, "must be a task, group, chain or chord"),
        (
            {"callbacks": [{**task("celery.group"), "subtask_type": "group", "kwargs": {"tasks": 7}}]},
            "tasks must be a list",
        ),
        ({"callbacks": [{**task(), "app": 1}]}, "unknown key 'app'"),
        ({"callbacks": ["shop.store"]}, "a signature of callbacks must be a map"),
        ({"callbacks": 7}, "callbacks must be a list of signatures"),
        ({"callbacks": [{**task(), "args": {}, "kwargs": [1]}]}, "args of the callback"),
        ({"callbacks": [{**task(), "options": [1]}]}, "options of the callback"),
        (
            {"errbacks": [{**task("celery.chain"), "subtask_type": "chain", "kwargs": {"tasks": [task()]}}]},
            "must be one task",
        ),
        ({"unknown": [task()]}, "unknown link 'unknown'"),
        *(
            ({"callbacks": [task(headers={name: "x"})]}, f"must not have '{name}'")
            for name in ("task", "id", "tenant", "key_name", "group_index")
        ),
        *(
            (
                {
                    "callbacks": [
                        {
                            **task("celery.group"),
                            "subtask_type": "group",
                            "kwargs": {"tasks": [task()]},
                            "options": {"stamped_headers": [name], name: {"link": [task("os.system")]}},
                        }
                    ]
                },
                "stamps, here of",
            )
            for name in ("options", "exchange", "routing_key", "mark")
        ),
        ({"callbacks": [task(headers={"x": [{}] * 10_001})]}, "must hold at most 10000 values"),
        (
            {
                "callbacks": [
                    {
                        **task("celery.chain"),
                        "subtask_type": "chain",
                        "kwargs": {"tasks": [task()] * 990},
                        "options": {"link_error": [task(headers={"x": "a" * 200_000})]},
                    }
                ]
            },
            "too large for so many callbacks",
        ),
        ({"callbacks": [task(group_index=True)]}, "group_index of the callback 'shop.store' must be 0 to"),
        ({"callbacks": [task(group_index=-1)]}, "group_index of the callback 'shop.store' must be 0 to"),
        ({"errbacks": [task(countdown="soon")]}, "countdown of the callback 'shop.store' must be 0 to"),
        ({"errbacks": [task(countdown=1e300)]}, "countdown of the callback 'shop.store' must be 0 to"),
        ({"errbacks": [task(expires="soon")]}, "expires of the callback 'shop.store' must be a time"),
        ({"errbacks": [task(eta=7)]}, "eta of the callback 'shop.store' must be"),
        ({"errbacks": [task(time_limit=float("nan"))]}, "time_limit of the callback 'shop.store' must be 0 to"),
        ({"callbacks": [task("headrace.generate")]}, "must name the queue of its model"),
        ({"callbacks": [nested(7) for _ in range(90)]}, "must be at most 2500 in sum"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hostile_links_are_refused(links: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        RULES.check({**NONE, **links})


def test_links_are_read_from_bodies_of_both_content_types() -> None:
    embed = {**NONE, "callbacks": [task()]}
    for content_type, body in (
        (JSON, json.dumps([[], {"prompt": "x"}, embed])),
        (MSGPACK, msgpack.packb([[], {"prompt": "x"}, embed])),
    ):
        links = RULES.links_in(body, content_type)
        assert links is not None
        assert links.callbacks == [task()]
    assert RULES.links_in(json.dumps([[], {}, NONE]), JSON) is None
    assert RULES.links_in(msgpack.packb([[], {}, {}]), MSGPACK) is None
    for broken in ("", "[", "[[], {}, 7]", "7"):
        assert RULES.links_in(broken, JSON) is None


def test_a_pattern_permits_no_task_of_celery() -> None:
    assert not CallbackRules(("*",)).permits("celery.map")
    assert CallbackRules(("celery.map",)).permits("celery.map")
    assert CallbackRules(("*",)).permits("shop.store")
    assert not CallbackRules(("*",)).permits(None)


def test_a_large_body_gives_the_ids_of_results_that_fail() -> None:
    embed = {**NONE, "callbacks": [task()], "chain": [task(task_id="a")]}
    links = RULES.links_in(json.dumps([[], {"prompt": "x" * MAX_BODY_BYTES}, embed]), JSON)
    assert links is not None
    assert (links.callbacks, links.chain) == ([], [{"task": "", "options": {"task_id": "a"}}])


def test_of_a_refused_chord_the_result_of_its_body_fails() -> None:
    step = {**task("celery.chord"), "subtask_type": "chord", "kwargs": {"header": [], "body": task(task_id="c")}}
    links = RULES.links_in(json.dumps([[], {}, {**NONE, "chain": [step], "chord": task("evil", task_id="b")}]), JSON)
    assert links is not None
    assert [each["options"]["task_id"] for each in links.chain] == ["b", "c"]
    assert links.chord is None


def test_of_refused_links_only_the_ids_of_results_are_read() -> None:
    rest = [task("os.system", task_id="a", chord=task()), task(task_id=7), "x"]
    links = RULES.links_in(json.dumps([[], {}, {**NONE, "chain": rest, "callbacks": [task()]}]), JSON)
    assert links is not None
    assert (links.callbacks, links.errbacks, links.chord) == ([], [], None)
    assert links.chain == [{"task": "", "options": {"task_id": "a"}}]


@pytest.mark.parametrize(
    "name", ["headrace:models", "celery-task-meta-1", "a\x06\x163", "", "_kombu.x", "unacked", "é"]
)
def test_a_queue_of_callbacks_is_no_other_key_of_celery_or_headrace(name: str) -> None:
    assert queue_problem(name) is not None
    assert queue_problem("shop") is None


def test_the_result_of_a_parent_becomes_keyword_arguments() -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert keyword_arguments("headrace.generate", ["hi"], {"lora": "x"}) == {"prompt": "hi", "lora": "x"}
    assert keyword_arguments("headrace.generate", [chat], {}) == {"messages": chat}
    assert keyword_arguments("headrace.generate", [{"prompt": "hi"}], {}) == {"prompt": "hi"}
    assert keyword_arguments("headrace.embed", [["a", "b"]], {}) == {"input": ["a", "b"]}
    assert keyword_arguments("headrace.score", [{"query": "a"}], {"documents": ["b"]}) == {
        "query": "a",
        "documents": ["b"],
    }
    for name, args in (
        ("headrace.generate", [7]),
        ("headrace.generate", [[]]),
        ("headrace.generate", [["a"]]),
        ("headrace.generate", [None]),
        ("headrace.score", ["a"]),
        ("headrace.generate", ["a", "b"]),
    ):
        with pytest.raises(InvalidRequestError, match="positional argument"):
            keyword_arguments(name, args, {})
    with pytest.raises(InvalidRequestError, match="given twice"):
        keyword_arguments("headrace.generate", [{"prompt": "a"}], {"prompt": "b"})
