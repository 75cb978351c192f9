"""Full garbage collections do not block the event loops of workers and gateways."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace_broker.server.embedded import EmbeddedServer
from service.gateway.gateway_process import GatewayProcess
from service.workers.service import Service

# Every interpreter with this folder on its path loads it. It records how many objects are exempt from collections.
WITNESS = """
import gc, os
freeze = gc.freeze
def freeze_and_record():
    freeze()
    with open({folder!r} + f"/{os.getpid()}", "w") as file:
        file.write(f"{gc.get_freeze_count()} {len(gc.get_objects())}")
gc.freeze = freeze_and_record
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sitecustomize.py").write_text(WITNESS.replace("{folder!r}", repr(str(tmp_path))))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    return tmp_path


def assert_exempt(file: Path) -> None:
    frozen, collected = map(int, file.read_text().split())
    assert frozen > 20_000
    assert collected < 1_000


def test_a_worker_never_collects_its_imports(make_service: Callable[..., Service], folder: Path) -> None:
    worker = make_service().start_worker().wait_ready()
    assert_exempt(folder / str(worker.process.pid))


def test_a_gateway_never_collects_its_imports(redis_server: EmbeddedServer, folder: Path) -> None:
    gateway = GatewayProcess(redis_url=redis_server.url, log=folder / "gateway.log")
    try:
        gateway.wait_ready()
        assert_exempt(folder / str(gateway.process.pid))
    finally:
        gateway.close()
