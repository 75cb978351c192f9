"""Celery's command line and Flower with a real worker, by its URL and without an application, as in docs/enqueue.md.

Redis has the users of docker-compose.yml; these tools use `operator`.
"""

import json
import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from headrace_broker.server.embedded import free_port
from service.operations.client_snippets import commands
from service.redis_users import ServerWithUsers, url_of
from service.workers.conftest import model_folder
from service.workers.service import QUEUE, Service

__all__ = ["model_folder"]

pytestmark = pytest.mark.rotated_file("docs/enqueue.md")

INSPECT = [
    "active",
    "active_queues",
    "clock",
    "conf",
    "memdump",
    "memsample",
    "ping",
    "query_task nobody",
    "registered",
    "report",
    "reserved",
    "revoked",
    "scheduled",
    "stats",
]


@pytest.fixture(scope="module")
def service(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("tools")
    with ServerWithUsers(folder) as server:
        made = Service(server, model_folder, folder, url=url_of(server, "admin"))
        try:
            made.start_worker(redis_url=url_of(server, "worker")).wait_ready()
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def name(service: Service) -> str:
    """The name of the worker: a command for it alone does not wait for other workers."""
    with Celery(broker=service.url, set_as_current=False) as app:
        [answer] = app.control.ping(timeout=60, limit=1)
    return str(*answer)


def command_line(service: Service, arguments: str) -> list[str]:
    url = url_of(service.server, "operator")
    return [sys.executable, "-m", "celery", "-b", url, "--result-backend", url, *shlex.split(arguments)]


def celery(service: Service, arguments: str, *, code: int = 0) -> str:
    """Run a command in a folder without an application; return its output."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "PYTHONPATH"))}
    done = subprocess.run(
        command_line(service, arguments), cwd="/", env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr[-2000:]
    return done.stdout


def test_the_page_shows_these_commands() -> None:
    shown = "\n".join(commands())
    for word in ("status", "inspect active", "call headrace.generate", "events --dump", "flower"):
        assert word in shown


def test_status_sees_the_worker(service: Service) -> None:
    assert "1 node online" in celery(service, "status --timeout 10")


@pytest.mark.parametrize("command", INSPECT)
def test_inspect_gets_an_answer(service: Service, name: str, command: str) -> None:
    printed = celery(service, f"inspect --timeout 60 -d {name} --json {command}")
    [answer] = json.loads(printed).values()
    assert answer is not None


def test_a_refused_command_is_printed_as_an_error(service: Service, name: str) -> None:
    assert "--max-num-seqs" in celery(service, f"control --timeout 60 -d {name} pool_grow 3")
    assert QUEUE in celery(service, f"control --timeout 60 -d {name} add_consumer foreign")
    assert "pong" in celery(service, f"inspect --timeout 60 -d {name} ping")


def test_call_sends_a_request_and_result_reads_it(service: Service) -> None:
    kwargs = json.dumps({"prompt": "hello", "sampling_params": {"max_tokens": 3, "ignore_eos": True}})
    request_id = celery(service, f"call headrace.generate --kwargs {shlex.quote(kwargs)} --queue {QUEUE}").strip()
    service.wait_ended([request_id])
    service.stored(request_id)
    assert "'completion_tokens': 3" in celery(service, f"result {request_id}")


def test_control_revokes_a_request(service: Service, name: str) -> None:
    delayed = service.send({"prompt": "x"}, countdown=3600)
    printed = celery(service, f"inspect --timeout 60 -d {name} scheduled")
    while delayed.id not in printed:
        printed = celery(service, f"inspect --timeout 60 -d {name} scheduled")
    assert delayed.id in celery(service, f"control --timeout 60 -d {name} revoke {delayed.id}")
    assert service.stored(delayed.id)[1]["status"] == "REVOKED"
    assert delayed.id in celery(service, f"inspect --timeout 60 -d {name} revoked")


def test_the_events_command_prints_the_end_of_a_request(service: Service) -> None:
    with subprocess.Popen(
        command_line(service, "events --dump"), cwd="/", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as events:
        try:
            assert events.stdout is not None
            request_id = ""
            for line in events.stdout:
                if not request_id and "heartbeat" in line:  # the command receives events
                    request_id = service.generate(max_tokens=2).id
                if request_id and f"task succeeded: headrace.generate({request_id})" in line:
                    break
            else:
                raise AssertionError("the events ended")
        finally:
            events.terminate()


class Flower:
    """A real Flower for the worker."""

    def __init__(self, service: Service, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = folder / "flower.log"
        arguments = f"flower --address=127.0.0.1 --port={self.url.rpartition(':')[2]}"
        environ = {**os.environ, "FLOWER_UNAUTHENTICATED_API": "true"}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command_line(service, arguments), cwd=folder, env=environ, stdout=output, stderr=output
            )

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def wait_for(self, path: str, word: str) -> str:
        deadline = time.monotonic() + 120
        while word not in (answer := self.get(path))[1]:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, f"no {word} in {answer}\n{self.log.read_text()[-3000:]}"
            time.sleep(0.1)
        return answer[1]

    def post(self, path: str) -> dict[str, Any]:
        request = urllib.request.Request(self.url + path, method="POST", data=b"")
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return dict(json.load(response))
        except urllib.error.HTTPError as error:
            return {"status": error.code, "text": error.read().decode()}


@pytest.fixture(scope="module")
def flower(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flower]:
    pytest.importorskip("flower", reason="Flower is not installed")
    made = Flower(service, tmp_path_factory.mktemp("flower"))
    try:
        made.wait_for("/healthcheck", "OK")
        yield made
    finally:
        made.process.terminate()
        made.process.wait(timeout=30)


def test_flower_shows_the_workers_pool_tasks_and_queues(service: Service, flower: Flower) -> None:
    [name] = json.loads(flower.wait_for("/api/workers?refresh=1", "headrace-tiny"))
    [worker] = json.loads(flower.get("/api/workers")[1]).values()
    assert worker["stats"]["pool"]["max-concurrency"] == 32
    assert worker["registered"] == [f"headrace.{task}" for task in ("classify", "decide", "embed", "generate", "score")]
    assert [queue["name"] for queue in worker["active_queues"]] == [QUEUE]
    for page in ("/", "/workers", f"/worker/{name}", "/tasks", "/broker", "/metrics"):
        assert flower.get(page)[0] == 200, page
    assert json.loads(flower.get("/api/queues/length")[1])["active_queues"][0]["name"] == QUEUE


def test_flower_shows_a_task_and_can_revoke_one(service: Service, flower: Flower) -> None:
    [name] = json.loads(flower.wait_for("/api/workers?refresh=1", "headrace-tiny"))
    done = service.generate("Zanzibar", max_tokens=2)
    shown = flower.wait_for("/api/tasks?limit=100&taskname=headrace.generate", done.id)
    assert "Zanzibar" not in shown
    assert flower.get(f"/task/{done.id}")[0] == 200
    delayed = service.send({"prompt": "x"}, countdown=3600)
    assert "message" in flower.post(f"/api/task/revoke/{delayed.id}?terminate=true")
    assert service.stored(delayed.id)[1]["status"] == "REVOKED"
    refused = flower.post(f"/api/worker/pool/grow/{name}?n=3")
    assert "--max-num-seqs" in str(refused)
