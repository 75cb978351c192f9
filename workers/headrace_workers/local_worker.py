"""`LocalWorker`: a real worker process on this machine, for the demo and the benchmarks."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from headrace_workers.errors import HeadraceWorkerError

_START_SECONDS = 180.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class WorkerStartError(HeadraceWorkerError):
    """The worker ended, or was not ready in time; the message has the end of its log."""


class LocalWorker:
    """A context manager that holds one `headrace worker` with settings of its own.

    The process leads its own group, so a Ctrl-C reaches only whoever holds it, and dies with the thread that started
    it. Leaving the context drains it.

    Args:
        log: gets its output.
        port: of metrics and health; a free one when 0.
        settings: of the worker, by name.
    """

    def __init__(self, *, model: str, redis_url: str, log: Path, port: int = 0, **settings: object) -> None:
        self._log = log
        self._port = port or _free_port()
        self._environ = {
            **os.environ,
            "HEADRACE_MODEL": model,
            "HEADRACE_REDIS_URL": redis_url,
            "HEADRACE_METRICS_PORT": str(self._port),
            **{f"HEADRACE_{name.upper()}": str(value) for name, value in settings.items()},
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where metrics and health are served."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from headrace_workers.cli import main; main()", "worker"],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                preexec_fn=_die_with_parent,
            )

    def wait_ready(self, timeout: float = _START_SECONDS) -> None:
        """Block until the model is loaded and requests are taken. Raises WorkerStartError."""
        for reason in self.readiness(timeout):
            if reason is None:
                return

    def readiness(self, timeout: float = _START_SECONDS) -> Iterator[str | None]:
        """Yields why the worker is not ready, several times a second, and None once it is; then ends."""
        assert self._process is not None, "not started"
        deadline = time.monotonic() + timeout
        while True:
            status = self._process.poll()
            if status is not None:
                raise WorkerStartError(f"the worker ended with status {status}:\n{self.log_tail()}")
            reason = _not_ready(self.url)
            yield reason
            if reason is None:
                return
            if time.monotonic() > deadline:
                raise WorkerStartError(f"the worker is not ready after {timeout:g} s ({reason}):\n{self.log_tail()}")
            time.sleep(0.1)

    def stop(self, timeout: float = 20.0) -> int:
        """SIGTERM, and SIGKILL after `timeout` seconds; returns the exit status."""
        assert self._process is not None, "not started"
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed
                return self._process.wait(timeout)
            self._process.kill()
        return self._process.wait()

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> "LocalWorker":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _not_ready(url: str) -> str | None:
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=2):  # noqa: S310  # our own loopback address
            return None
    except urllib.error.HTTPError as error:
        return str(json.loads(error.read()).get("reason"))
    except OSError:
        return "the worker is starting"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _die_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
