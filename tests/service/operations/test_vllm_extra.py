"""The extra `headrace[vllm]`: a worker without torch, whose engine computes in another interpreter."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace_broker import Client
from headrace_broker.server.embedded import EmbeddedServer
from service.operations.client_snippets import ROOT
from service.operations.fresh_environments import install_pip, pip
from service.workers.conftest import model_folder
from service.workers.worker_process import WorkerProcess

pytestmark = pytest.mark.rotated_file("pyproject.toml")

__all__ = ["model_folder"]

StartWorker = Callable[..., WorkerProcess]


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs in a new environment with the extra."""
    folder = tmp_path_factory.mktemp("vllm-extra")
    install_pip(folder, ["install", "--constraint", str(ROOT / "constraints.txt"), ".[vllm]"])
    return folder / "bin"


@pytest.fixture
def start_worker(
    bin_folder: Path, model_folder: str, redis_server: EmbeddedServer, tmp_path: Path
) -> Iterator[StartWorker]:
    started: list[WorkerProcess] = []

    def start(**settings: object) -> WorkerProcess:
        made = WorkerProcess(
            model=model_folder,
            redis_url=redis_server.url,
            log=tmp_path / "log",
            command=[str(bin_folder / "headrace"), "worker"],
            environ={"PYTHONPATH": ""},
            **settings,
        )
        started.append(made)
        return made

    yield start
    for made in started:
        made.process.kill()
        made.process.wait()


def test_the_extra_installs_neither_torch_nor_packages_that_read_weights(bin_folder: Path) -> None:
    command = pip(bin_folder.parent, "list", "--format", "json")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    installed = {package["name"].lower() for package in json.loads(done.stdout)}
    assert "headrace" in installed
    assert {"torch", "accelerate", "gguf", "triton", "vllm"}.isdisjoint(installed)


def test_a_vllm_worker_without_vllm_ends_with_one_sentence(start_worker: StartWorker, bin_folder: Path) -> None:
    worker = start_worker(engine="vllm", device="auto")
    assert worker.process.wait(timeout=120) != 0
    (line,) = [line for line in worker.log_lines() if line["event"].startswith("the worker stops: ")]
    assert f"engine vllm cannot import its parts with {bin_folder / 'python'}" in line["event"]
    assert "pip install vllm" in line["event"]
    assert "Traceback" not in worker.log_text()


def test_a_worker_without_torch_serves_an_engine_in_an_environment_with_torch(
    start_worker: StartWorker, redis_server: EmbeddedServer
) -> None:
    worker = start_worker(engine="headrace", engine_python=sys.executable).wait_ready()
    with Client(redis_server.url, model="tiny") as client:
        request_id = client.submit(
            messages=[{"role": "user", "content": "a b"}],
            sampling_params={"max_tokens": 8, "ignore_eos": True, "structured_outputs": {"regex": "[a-z ]{20,}"}},
        )
        (output,) = client.result(request_id, timeout=120).outputs
    assert len(output.token_ids) == 8
    assert worker.process.poll() is None
    assert "PyTorch was not found" not in worker.log_text()


def test_the_default_model_is_not_fetched_if_it_cannot_be_converted(bin_folder: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [bin_folder / "headrace", "model"],
        env={"PATH": str(bin_folder), "HOME": str(tmp_path), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "is converted by accelerate, gguf, torch, which" in done.stderr
    assert "fetching" not in done.stderr
