"""`WorkerProcess`: a real `headrace worker` in a process of its own, as an operator would run it.

Every descendant of a worker has the worker's marker in its environment, so that tests find all of them.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_broker.server.embedded import die_with_parent

HEADRACE = [sys.executable, "-c", "from headrace_cli.main import main; main()", "worker"]
_MARKER = "HEADRACE_TEST_MARKER"
DEVICE_VARIABLE = "HEADRACE_TEST_DEVICE"
"""Device of every worker whose test names none, to run all service tests on another runner."""
_ENGINES = (b"headrace_engine.core.child", b"headrace_engine_vllm.child")
PATIENCE = 300.0
"""Seconds. Only a failure takes all of them, but a slow machine may need many."""


class WorkerProcess:
    """A worker of the model in `model`. `settings` are environment variables without their prefix.

    Args:
        environ: other environment variables of the worker.
    """

    def __init__(
        self,
        *,
        model: str,
        redis_url: str,
        log: Path,
        command: list[str] | None = None,
        environ: Mapping[str, str] | None = None,
        **settings: object,
    ) -> None:
        self.log = log
        self.marker = uuid.uuid4().hex
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        environ = inherited | dict(environ or {})
        environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", _MARKER: self.marker}
        defaults: dict[str, object] = {
            "model": model,
            "served_model_name": "tiny",
            "redis_url": redis_url,
            "dtype": "float32",
            "max_num_seqs": 32,
            "kv_cache_memory": "64MiB",
            "metrics_port": 0,
            "device": os.environ.get(DEVICE_VARIABLE, "cpu"),
        }
        for name, value in (defaults | settings).items():
            environ[f"HEADRACE_{name.upper()}"] = str(value)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command or HEADRACE,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
                preexec_fn=die_with_parent,
            )

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def log_lines(self) -> list[dict[str, Any]]:
        """Read the log's events, without lines that are not JSON."""
        events = []
        for line in self.log_text().splitlines():
            with contextlib.suppress(ValueError):
                events.append(json.loads(line))
        return events

    def wait_for_log(self, pattern: str, timeout: float = PATIENCE, count: int = 1) -> "re.Match[str]":
        """Wait until the pattern is in the log `count` times, and return the last match."""
        deadline = time.monotonic() + timeout
        while True:
            found = list(re.finditer(pattern, self.log_text()))
            if len(found) >= count:
                return found[count - 1]
            if self.process.poll() is not None and len(re.findall(pattern, self.log_text())) < count:
                raise AssertionError(f"the worker ended without {pattern!r} in its log:\n{self.log_text()[-4000:]}")
            if time.monotonic() > deadline:
                raise AssertionError(f"no {pattern!r} in the log after {timeout} s:\n{self.log_text()[-4000:]}")
            time.sleep(0.01)

    def wait_ready(self, timeout: float = PATIENCE) -> "WorkerProcess":
        deadline = time.monotonic() + timeout
        self.wait_for_log(r"metrics on http://", timeout)
        while self.health("ready")[0] != 200:
            assert self.process.poll() is None, self.log_text()[-4000:]
            assert time.monotonic() < deadline, self.log_text()[-4000:]
            time.sleep(0.02)
        return self

    @property
    def url(self) -> str:
        return self.wait_for_log(r"metrics on (http://[^/]+)/metrics")[1]

    def health(self, probe: str) -> tuple[int, str]:
        """Get status and body of /health/<probe>; status 0 without an answer."""
        return _get(f"{self.url}/health/{probe}")

    def metrics(self) -> dict[str, float]:
        """Read every series of /metrics, by name and labels without the model and the queue."""
        time.sleep(0.11)  # the worker renders ten times a second at most, and the test needs the current state
        series = {}
        for line in _get(f"{self.url}/metrics")[1].splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = re.sub(r'(model|queue)="[^"]*",?', "", name).replace(",}", "}").replace("{}", "")
                series[name] = float(value)
        return series

    def engine_pid(self) -> int:
        """Wait for the engine's process and return its id."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for pid in self.processes():
                if pid != self.process.pid and any(name in _read(pid, "cmdline") for name in _ENGINES):
                    return pid
            time.sleep(0.01)
        raise AssertionError("the worker has no engine process")

    def processes(self) -> list[int]:
        """List the worker and all its living descendants."""
        marker = f"{_MARKER}={self.marker}".encode()
        return [
            int(folder.name)
            for folder in Path("/proc").iterdir()
            if folder.name.isdigit() and marker in _read(int(folder.name), "environ")
        ]

    def kill(self) -> None:
        """Kill the worker as a crash would, without a shutdown."""
        self.process.kill()
        self.process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = PATIENCE) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker has not ended after {timeout} s:\n{self.log_text()[-4000:]}") from None

    def assert_nothing_left(self) -> None:
        """Assert that the worker and all its descendants have ended. The kernel may take a moment to end an orphan."""
        deadline = time.monotonic() + PATIENCE
        while self.processes():
            assert time.monotonic() < deadline, f"left behind: {[_read(pid, 'cmdline') for pid in self.processes()]}"
            time.sleep(0.01)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
