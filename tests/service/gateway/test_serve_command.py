"""`headrace serve` as a process: what it starts and prints, and that no process remains after it."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from engine.pooling.tiny_pooling_models import build
from headrace_broker.server.embedded import free_port
from headrace_engine.system.private_folder import cache_folder
from service.gateway.gateway_process import PATIENCE
from service.servers import make_server

pytestmark = pytest.mark.rotated("cli/headrace_cli/local")

SERVE = [sys.executable, "-c", "from headrace_cli.main import main; main()", "serve"]


class ServeProcess:
    """`headrace serve` with an empty home, compiled kernels of this user, and both outputs in one."""

    def __init__(self, home: Path, *arguments: str) -> None:
        home.mkdir(exist_ok=True)
        environ = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
        environ |= {"HOME": str(home), "TMPDIR": str(home), "XDG_CACHE_HOME": str(cache_folder().parent)}
        self.home = home
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [*SERVE, *arguments],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests may run where it is ignored
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip("\n"))

    def wait_ready(self) -> "ServeProcess":
        self.wait_line("Web page: ")
        return self

    def wait_line(self, start: str) -> str:
        """Return the first line that begins so; it is printed last."""
        deadline = time.monotonic() + 4 * PATIENCE
        while not (found := [line for line in self.lines if line.startswith(start)]):
            assert self.process.poll() is None, self.lines
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.05)
        return found[0]

    def children(self) -> dict[str, int]:
        """Return its processes by kind."""
        found = {}
        for pid, command in commands():
            for name in ("worker", "gateway"):
                if command[-1:] == [name] and parent(pid) == self.process.pid:
                    found[name] = pid
            if parent(pid) == self.process.pid and "-server " in command[0]:  # the title that it sets
                found["server"] = pid
        return found

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        status = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)  # the pipe ends when the last process that holds it has ended
        assert not self._reader.is_alive()
        return status

    def left(self) -> list[tuple[int, list[str]]]:
        """Return the processes that outlive it; killed ones get time to exit."""
        deadline = time.monotonic() + PATIENCE
        while (found := self.living()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def living(self) -> list[tuple[int, list[str]]]:
        """The processes that have its folder in their environment."""
        mark = f"TMPDIR={self.home}".encode()
        return [(pid, command) for pid, command in commands() if mark in read(pid, "environ").split(b"\0")]


def commands() -> list[tuple[int, list[str]]]:
    """Every process and its command line."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [(pid, read(pid, "cmdline").decode(errors="replace").rstrip("\0").split("\0")) for pid in pids]


def read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""  # it has ended


def parent(pid: int) -> int:
    found = re.search(rb"^PPid:\s+(\d+)$", read(pid, "status"), re.MULTILINE)
    return int(found[1]) if found else 0


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., ServeProcess]]:
    made: list[ServeProcess] = []

    def start(*arguments: str) -> ServeProcess:
        made.append(ServeProcess(tmp_path / f"home{len(made)}", *arguments))
        return made[-1]

    yield start
    for process in made:
        if process.process.poll() is None:
            process.process.kill()
        process.wait()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_the_printed_command_works_and_one_signal_ends_everything(
    serve: Callable[..., ServeProcess], model_folder: str, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    port = str(free_port())
    files = tmp_path / "files"
    serving = serve("--model", model_folder, "--port", port, "--files", str(files)).wait_ready()
    started = serving.children()
    assert set(started) == {"server", "worker", "gateway"}
    assert any(line.startswith("waiting: the worker") for line in serving.lines)
    line = serving.wait_line("Try it: ").removeprefix("Try it: ")
    assert f"http://127.0.0.1:{port}/v1/chat/completions" in shlex.split(line)
    answer = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=4 * PATIENCE, check=True)
    assert answer.stdout.rstrip().endswith("data: [DONE]"), answer.stdout
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
        uploaded = client.files.create(file=("requests.jsonl", b"{}\n"), purpose="batch")
    assert [path.stem for path in files.glob("*/*.json")] == [uploaded.id]
    assert serving.end(number) == status
    assert serving.left() == []
    assert list(serving.home.glob("headrace-*")) == []  # neither logs nor the server's folder


def test_a_model_without_a_chat_template_is_introduced_by_a_completion(
    serve: Callable[..., ServeProcess], model_folder: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model_folder, tmp_path / "plain"))
    (folder / "chat_template.jinja").unlink()
    serving = serve("--model", str(folder), "--port", str(free_port())).wait_ready()
    line = serving.wait_line("Try it: ").removeprefix("Try it: ")
    answer = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=4 * PATIENCE, check=True)
    assert answer.stdout.rstrip().endswith("data: [DONE]"), answer.stdout
    assert any("no chat template" in line for line in serving.lines)


@pytest.mark.parametrize(
    ("suffix", "labels", "path", "answer"),
    [
        ("Model", 0, "embeddings", '"embedding"'),
        ("ForSequenceClassification", 1, "rerank", '"relevance_score"'),
        ("ForSequenceClassification", 3, "classify", '"probs"'),
    ],
)
def test_a_model_that_does_not_generate_is_introduced_by_what_it_computes(
    serve: Callable[..., ServeProcess], tmp_path: Path, suffix: str, labels: int, path: str, answer: str
) -> None:
    folder = tmp_path / "model"
    build(folder, "bert", suffix=suffix, config={"num_labels": labels} if labels else None)
    serving = serve("--model", str(folder), "--port", str(free_port())).wait_ready()
    line = serving.wait_line("Try it: ").removeprefix("Try it: ")
    assert f"/v1/{path} " in line
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=4 * PATIENCE, check=True)
    assert answer in done.stdout
    assert not any("chat template" in line for line in serving.lines)


def test_no_password_stands_on_a_command_line(serve: Callable[..., ServeProcess], model_folder: str) -> None:
    serving = serve("--model", model_folder, "--port", str(free_port()))
    serving.wait_line("worker: process")
    (worker,) = [
        pid for pid, command in commands() if command[-1:] == ["worker"] and parent(pid) == serving.process.pid
    ]
    found = re.search(rb"HEADRACE_REDIS_URL=redis://:([0-9a-f]+)@", read(worker, "environ"))
    assert found
    assert all(found[1].decode() not in part for _, command in commands() for part in command)
    assert all(found[1].decode() not in line for line in serving.lines)


def test_no_process_remains_after_it_is_killed(serve: Callable[..., ServeProcess], model_folder: str) -> None:
    serving = serve("--model", model_folder, "--port", str(free_port())).wait_ready()
    assert len(serving.living()) > 3  # itself and its children
    serving.end(signal.SIGKILL)
    assert serving.left() == []


@pytest.mark.parametrize(
    ("child", "reason"),
    [
        ("worker", "the worker ended with status -9"),
        ("gateway", "the gateway ended with status -9"),
        ("server", "the Redis server ended with status -9"),
    ],
)
def test_a_dead_child_ends_the_command_with_its_error(
    serve: Callable[..., ServeProcess], model_folder: str, child: str, reason: str
) -> None:
    serving = serve("--model", model_folder, "--port", str(free_port())).wait_ready()
    os.kill(serving.children()[child], signal.SIGKILL)
    assert serving.wait() == 1
    assert any(line.startswith(f"headrace: {reason}") for line in serving.lines), serving.lines
    assert serving.left() == []


def test_a_model_that_cannot_be_loaded_ends_the_command_with_its_error(serve: Callable[..., ServeProcess]) -> None:
    serving = serve("--model", "/nothing/here", "--port", str(free_port()))
    assert serving.wait() == 1
    assert "/nothing/here" in "\n".join(serving.lines)
    assert serving.left() == []


def test_a_port_in_use_is_reported_before_anything_is_started(serve: Callable[..., ServeProcess]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        serving = serve("--port", str(port))  # the default model, which would be fetched first
        assert serving.wait() == 1
    (line,) = serving.lines
    assert line == (
        f"headrace: cannot listen on 127.0.0.1 port {port} (Address already in use): choose --host or --port"
    )


def test_a_public_address_without_keys_is_refused_before_anything_is_started(
    serve: Callable[..., ServeProcess],
) -> None:
    serving = serve("--host", "0.0.0.0", "--port", str(free_port()))
    assert serving.wait() == 1
    (line,) = serving.lines
    assert "gateway-key" in line


def test_an_existing_redis_is_used_and_left_running(serve: Callable[..., ServeProcess], model_folder: str) -> None:
    with make_server() as server:
        serving = serve("--model", model_folder, "--port", str(free_port()), "--redis-url", server.url).wait_ready()
        assert set(serving.children()) == {"worker", "gateway"}
        assert serving.end(signal.SIGINT) == 0
        server.check_alive()
