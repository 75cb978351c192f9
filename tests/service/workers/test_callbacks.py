"""Chains, links, groups and chords of Celery with requests to Headrace in them, beside a plain Celery worker."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Signature, chain, chord, group
from celery.exceptions import ChordError

from headrace_broker.queue.leases import Leases
from headrace_broker.server.connections import connect
from headrace_broker.server.rights import refused_lists
from service.redis_users import ROOT, ServerWithUsers, url_at
from service.servers import make_server
from service.workers.service import DEADLINE, QUEUE, Service
from service.workers.shop_app import ShopWorker, close_app, make_app
from service.workers.worker_process import WorkerProcess

pytestmark = pytest.mark.rotated("workers/headrace_workers/celery", "workers/headrace_workers/preparation")

PERMITTED = {"callback_tasks": "shop.*,headrace.generate", "callback_queues": f"celery,shop,{QUEUE}"}
PARAMS = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}


class Shop:
    """A service whose worker permits callbacks, and a plain Celery worker that runs them."""

    def __init__(self, service: Service, folder: Path) -> None:
        self.service = service
        self.app = make_app(service.url)
        self.worker = ShopWorker(service.url, folder / "shop.log")

    def task(self, name: str, *args: Any, **kwargs: Any) -> Signature:
        return self.app.signature(f"shop.{name}", args=args, kwargs=kwargs)

    def generate(self, *args: Any, max_tokens: int = 4, **kwargs: Any) -> Signature:
        params = {**PARAMS, "max_tokens": max_tokens}
        return self.app.signature(
            "headrace.generate", args=args, kwargs={**kwargs, "sampling_params": params}, queue=QUEUE
        )

    def calls(self, name: str) -> list[list[Any]]:
        """The arguments of each run of a task."""
        found = [json.loads(call) for call in self.service.client.lrange("shop:calls", 0, -1)]
        return [args for task, _, args in found if task == f"shop.{name}"]

    def assert_each_ran_once(self) -> None:
        runs = self.service.client.hgetall("shop:runs")
        assert set(runs.values()) <= {b"1"}, runs

    def close(self) -> None:
        self.worker.close()
        close_app(self.app)


@pytest.fixture(scope="module")
def shop(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("shop")
    with make_server() as server:
        service = Service(server, model_folder, folder)
        shop = Shop(service, folder)
        try:
            service.start_worker(**PERMITTED).wait_ready()
            shop.worker.wait_ready()
            yield shop
        finally:
            shop.close()
            service.close()


@pytest.fixture(autouse=True)
def no_calls(shop: Shop) -> None:
    shop.service.client.delete("shop:calls", "shop:runs")


def test_a_chain_passes_the_parents_result_to_the_model_and_the_models_result_on(shop: Shop) -> None:
    last = chain(shop.task("fetch", "the wheel"), shop.generate(), shop.task("store", note="kept"), app=shop.app)
    done = last.apply_async()
    request_id = done.parent.id
    assert done.parent.get(timeout=DEADLINE)["error"] is None
    assert done.get(timeout=DEADLINE) == request_id
    assert shop.calls("store") == [[request_id, "kept"]]
    shop.assert_each_ran_once()


def test_the_model_takes_a_text_a_chat_or_keywords_and_refuses_other_results_of_the_parent(shop: Shop) -> None:
    chat = [{"role": "user", "content": "the wheel"}]
    for parent in ("the wheel", chat, {"prompt": "the wheel", "model": "tiny"}):
        done = chain(shop.task("fetch", parent), shop.generate(), app=shop.app).apply_async()
        assert done.get(timeout=DEADLINE)["error"] is None
    for parent, problem in (
        (7, "the positional argument must be a text (the prompt), a list of messages, or a map"),
        ({"sampling_params": {}}, "is given twice: by the positional argument and as a keyword"),
        ({"question": "why"}, "unknown key 'question'"),
    ):
        done = chain(shop.task("fetch", parent), shop.generate(), app=shop.app).apply_async()
        assert problem in done.get(timeout=DEADLINE)["error"]["message"]


def test_links_run_after_success_and_errbacks_with_the_id_after_an_error(shop: Shop) -> None:
    good, bad = shop.generate(prompt="the wheel"), shop.generate(prompt="the wheel", model="another")
    for signature in (good, bad):
        signature.link(shop.task("store", note="one"))
        signature.link(shop.task("store", note="two"))
        signature.link_error(shop.task("failed"))
    answered, refused = good.apply_async(), bad.apply_async()
    shop.service.wait_until(lambda: len(shop.calls("store")) == 2 and shop.calls("failed"))
    assert sorted(shop.calls("store")) == [[answered.id, "one"], [answered.id, "two"]]
    assert shop.calls("failed") == [[refused.id]]
    shop.assert_each_ran_once()


def test_the_rest_of_a_chain_fails_with_its_request(shop: Shop) -> None:
    rest = shop.task("store"), shop.task("store")
    done = chain(shop.generate(prompt="the wheel", model="another"), *rest, app=shop.app).apply_async()
    with pytest.raises(Exception, match="model_not_found: model 'another' is not served here"):
        done.get(timeout=DEADLINE)
    assert done.parent.status == "FAILURE"
    assert shop.calls("store") == []


def test_a_chord_of_requests_and_plain_tasks_calls_its_body_with_the_results_in_order(shop: Shop) -> None:
    header = [shop.generate(prompt=f"wheel {number}") for number in range(5)]
    header.insert(2, shop.task("fetch", "between"))
    done = chord(header, shop.task("gather"), app=shop.app).apply_async()
    assert done.get(timeout=DEADLINE) == 6
    ids = [part.id for part in done.parent.results]
    assert shop.calls("gather") == [[[*ids[:2], "between", *ids[3:]]]]
    shop.assert_each_ran_once()
    assert [key for key in shop.service.client.keys("celery-taskset-meta-*") if not key.endswith(b".c")] == []


def test_a_chord_fails_with_one_of_its_requests(shop: Shop) -> None:
    body = shop.task("gather")
    body.link_error(shop.task("failed"))
    header = [shop.generate(prompt="wheel"), shop.generate(prompt="wheel", model="another"), shop.task("fetch", "x")]
    done = chord(header, body, app=shop.app).apply_async()
    with pytest.raises(ChordError, match="model 'another' is not served here"):
        done.get(timeout=DEADLINE)
    shop.service.wait_until(lambda: shop.calls("failed"))
    assert (shop.calls("failed"), shop.calls("gather")) == ([[done.id]], [])
    shop.assert_each_ran_once()


def test_a_request_may_start_a_group_a_chord_and_another_request(shop: Shop) -> None:
    first = chain(shop.generate(prompt="the wheel"), shop.task("store"), shop.generate(), app=shop.app)
    request = first.apply_async().get(timeout=DEADLINE)
    assert request["error"] is None
    spread = group(shop.task("store", note="left"), shop.task("store", note="right"), app=shop.app)
    done = chain(shop.generate(prompt="the wheel"), spread, shop.task("gather"), app=shop.app).apply_async()
    assert done.get(timeout=DEADLINE) == 2
    shop.assert_each_ran_once()


def test_a_request_may_be_the_body_of_a_chord(shop: Shop) -> None:
    header = [shop.task("fetch", {"role": "user", "content": "the wheel"}) for _ in range(3)]
    done = chord(header, shop.generate(), app=shop.app).apply_async()
    assert done.get(timeout=DEADLINE)["error"] is None


def test_a_request_that_becomes_a_dead_letter_fails_its_chord_and_sends_its_errbacks(
    make_service: Callable[..., Service], tmp_path: Path
) -> None:
    shop = Shop(make_service(), tmp_path)
    try:
        body, request = shop.task("gather"), shop.generate(prompt="the wheel")
        body.link_error(shop.task("failed"))
        request.link_error(shop.task("failed"))
        done = chord([request, shop.task("fetch", "x")], body, app=shop.app).apply_async()
        dead = done.parent.results[0].id
        client = redis.Redis.from_url(shop.service.url, protocol=2)
        leases = Leases(client, lease_seconds=60, delivery_limit=5)
        for _ in range(2):  # it was delivered to workers that died
            [message] = leases.fetch([QUEUE], 1)
            leases.requeue(message.lease_id, is_counted=True)
        shop.service.start_worker(**PERMITTED, delivery_limit=2)
        shop.worker.wait_ready()
        with pytest.raises(ChordError, match="dead_letter: given up after"):
            done.get(timeout=DEADLINE)
        shop.service.wait_until(lambda: len(shop.calls("failed")) == 2)
        assert sorted(shop.calls("failed")) == sorted([[done.id], [dead]])
        shop.assert_each_ran_once()
    finally:
        shop.close()


def test_the_shipped_user_of_workers_may_push_to_celerys_queue_and_to_others_with_a_pattern(tmp_path: Path) -> None:
    with ServerWithUsers(tmp_path) as server, connect(url_at(server.port, "worker")) as worker:
        assert refused_lists(worker, ["celery", "shop", QUEUE]) == ["shop"]
        with connect(server.url) as admin:
            admin.execute_command("ACL", "SETUSER", "worker", "~shop*")
        assert refused_lists(worker, ["celery", "shop", QUEUE]) == []


def test_hostile_links_are_refused_before_anything_runs_and_start_nothing(shop: Shop) -> None:
    app, client = shop.app, shop.service.client
    hostile = [
        app.signature("os.system", args=("true",)),
        app.signature("shop.store", queue="headrace:models"),
        app.signature("shop.store", exchange="headrace:lease:leases:headrace.tiny", routing_key="x"),
        app.signature("shop.store", reply_to="headrace.tiny"),
        app.signature("shop.store", serializer="pickle"),
        group([app.signature("shop.store") for _ in range(2000)], app=app),
        app.signature("shop.store", args=("x" * (1 << 20),)),
    ]
    before = {*client.keys("*")}
    handles = [shop.generate(prompt="the wheel").set(link=[each]).apply_async() for each in hostile]
    errors = [handle.get(timeout=DEADLINE)["error"] for handle in handles]
    assert {error["code"] for error in errors} == {"invalid_request"}
    assert "HEADRACE_CALLBACK_TASKS" in errors[0]["message"]
    assert "HEADRACE_CALLBACK_QUEUES" in errors[1]["message"]
    shop.service.wait_settled()
    assert shop.calls("store") == []
    found = [key for key in {*client.keys("*")} - before if not key.startswith((b"celery-task-meta-", b"headrace:"))]
    assert [key for key in found if not key.startswith((b"headrace", b"_kombu", b"unacked"))] == []
    assert client.type("headrace:models") == b"hash"


def test_the_example_of_the_page_runs(make_service: Callable[..., Service], tmp_path: Path) -> None:
    service = make_service()
    page = (ROOT / "docs" / "canvas.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    code = code.replace("redis://127.0.0.1:6379/0", service.url).replace("smollm2-135m-instruct", "tiny")
    (tmp_path / "shop.py").write_text(code, encoding="utf-8")
    place = {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "--pool", "threads", "--loglevel", "INFO"]
    service.start_worker(callback_tasks="shop.*")
    own = WorkerProcess(
        model="none", redis_url=service.url, log=tmp_path / "own.log", command=command, environ={**os.environ, **place}
    )
    try:
        own.wait_for_log(r" ready\.")
        script = "import json, shop; print(json.dumps([each().get(timeout=150) for each in (shop.one, shop.many)]))"
        ran = subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, **place}, capture_output=True, check=False, timeout=400
        )
    finally:
        own.close()
    assert ran.returncode == 0, ran.stderr.decode()[-2000:] + service.logs()
    one, many = json.loads(ran.stdout)
    assert isinstance(one, str)
    assert len(many) == 20
