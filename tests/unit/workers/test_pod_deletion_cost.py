"""A worker writes the cost of its pod to Kubernetes's API, here a stand-in for it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import pytest
import structlog

from headrace_workers.celery.pod_deletion_cost import ANNOTATION, PodDeletionCost
from headrace_workers.errors import WorkerSettingsError

SECONDS = 30.0
"""Only a failure waits so long."""


class Patch(NamedTuple):
    path: str
    headers: dict[str, str]
    body: Any


class Api:
    """Answers each PATCH with the next of these codes, the last one for ever."""

    def __init__(self, codes: list[int]) -> None:
        self.patches: Queue[Patch] = Queue()
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_PATCH(self) -> None:  # http.server's name
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                # before the answer, after which another thread may take the next PATCH
                api.patches.put(Patch(self.path, dict(self.headers), body))
                self.send_response(codes.pop(0) if len(codes) > 1 else codes[0])
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/api/v1/namespaces/ns/pods/worker-1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def costs(self, count: int) -> list[str]:
        patches = [self.patches.get(timeout=SECONDS) for _ in range(count)]
        return [patch.body["metadata"]["annotations"][ANNOTATION] for patch in patches]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "namespace").write_text("ns")
    return tmp_path


@pytest.fixture
def make_cost(folder: Path) -> Iterator[Any]:
    made: list[tuple[Api, PodDeletionCost]] = []

    def make(*codes: int) -> tuple[Api, PodDeletionCost]:
        api = Api([*codes])
        made.append((api, PodDeletionCost(api.url, folder)))
        made[-1][1].start()
        return made[-1]

    yield make
    for api, cost in made:
        cost.stop()
        cost.join()
        api.server.shutdown()
        api.server.server_close()


def test_a_changed_cost_is_written_to_the_pod_with_its_token_and_without_a_proxy(
    make_cost: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    api, cost = make_cost(200)
    for tokens in (0, 700, 700, 2**40, 0):
        cost.update(tokens)
    first = api.patches.get(timeout=SECONDS)
    assert first.path == "/api/v1/namespaces/ns/pods/worker-1"
    assert first.headers["Authorization"] == "Bearer secret"
    assert first.headers["Content-Type"] == "application/merge-patch+json"
    assert first.body == {"metadata": {"annotations": {ANNOTATION: "0"}}}
    assert api.costs(3) == ["700", str(2**31 - 1), "0"], "Kubernetes takes an int32, and the same cost once"


def test_a_refused_write_is_warned_of_once_and_tried_again(make_cost: Any) -> None:
    with structlog.testing.capture_logs() as logs:
        api, cost = make_cost(403, 403, 200, 500)
        for tokens in (5, 5, 5, 6):
            cost.update(tokens)
        assert api.costs(4) == ["5", "5", "5", "6"]
        cost.stop()
        cost.join()
    assert [line["log_level"] for line in logs] == ["warning", "warning"], "one before, one after the success"
    assert "403" in logs[0]["error"]


def test_a_server_that_is_away_does_not_end_the_worker(folder: Path) -> None:
    cost = PodDeletionCost("http://127.0.0.1:9/api/v1/namespaces/ns/pods/p", folder)
    with structlog.testing.capture_logs() as logs:
        cost.start()
        cost.update(1)
        cost.stop()
        cost.join()
    assert [line["log_level"] for line in logs] == ["warning"]


def test_a_server_that_does_not_speak_http_does_not_end_the_writes(folder: Path) -> None:
    answers = [b"not HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]
    with socket.create_server(("127.0.0.1", 0)) as server, structlog.testing.capture_logs() as logs:
        cost = PodDeletionCost(f"http://127.0.0.1:{server.getsockname()[1]}/p", folder)
        cost.start()
        for answer in answers:
            cost.update(7)
            server.settimeout(SECONDS)
            connection, _ = server.accept()
            with connection:
                while not connection.recv(4096).endswith(b"}"):
                    pass
                connection.sendall(answer)
        cost.stop()
        cost.join()
    assert [line["log_level"] for line in logs] == ["warning"]


def test_outside_of_a_pod_the_setting_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(WorkerSettingsError, match="KUBERNETES_SERVICE_HOST is None"):
        PodDeletionCost.of_this_pod(folder)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(WorkerSettingsError, match=str(folder / "other")):
        PodDeletionCost.of_this_pod(folder / "other")


@pytest.mark.parametrize(("host", "shown"), [("10.0.0.1", "10.0.0.1"), ("fd00::1", "[fd00::1]")])
def test_the_pod_is_found_by_its_name_and_namespace(
    folder: Path, monkeypatch: pytest.MonkeyPatch, host: str, shown: str
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    monkeypatch.setenv("POD_NAME", "worker-7")
    assert PodDeletionCost.of_this_pod(folder).url == f"https://{shown}:6443/api/v1/namespaces/ns/pods/worker-7"
