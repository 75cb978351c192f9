"""Runs a worker, a gateway or another `headrace` command on this machine, for the length of a `with` block."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self
from urllib.error import HTTPError

from headrace_broker.server.embedded import die_with_parent, free_port
from headrace_cli.errors import ProcessStartError

START_SECONDS = 180.0


class LocalProcess:
    """Run one `headrace COMMAND` for the length of a `with` block.

    The process leads a process group of its own, so Ctrl-C reaches only its parent. It dies with the thread that
    started it.

    Args:
        command: subcommand of `headrace`.
        log: file for its output.
        environ: environment variables, added to those of this process.
        url: its base URL for clients on this machine.
        ready: path that it answers without an error when it is ready.
    """

    def __init__(self, command: str, *, log: Path, environ: Mapping[str, str], url: str, ready: str) -> None:
        self.url = url
        self._ready_url = url + ready
        self._command = command
        self._log = log
        self._environ = {**os.environ, **environ}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from headrace_cli.main import main; main()", self._command],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                preexec_fn=die_with_parent,
            )

    def wait_ready(self, timeout: float = START_SECONDS) -> None:
        """Block until the process is ready. Raises ProcessStartError."""
        for _ in self.readiness(timeout):
            pass

    def readiness(self, timeout: float = START_SECONDS) -> Iterator[str | None]:
        """Yield why the process is not ready, several times a second; then None, once. Raises ProcessStartError."""
        deadline = time.monotonic() + timeout
        while True:
            self.check_alive()
            reason = self._not_ready()
            yield reason
            if reason is None:
                return
            if time.monotonic() > deadline:
                problem = f"the {self._command} is not ready after {timeout:g} s ({reason})"
                raise ProcessStartError(f"{problem}:\n{self.log_tail()}")
            time.sleep(0.1)

    def check_alive(self) -> None:
        """Raise ProcessStartError if the process has ended."""
        assert self._process is not None, "not started"
        status = self._process.poll()
        if status is not None:
            raise ProcessStartError(f"the {self._command} ended with status {status}:\n{self.log_tail()}")

    def _not_ready(self) -> str | None:
        """Return why the process cannot serve yet, or None if it can."""
        try:
            with urllib.request.urlopen(self._ready_url, timeout=2):  # noqa: S310  # our own address
                return None
        except urllib.error.HTTPError as error:
            return self._reason(error)
        except OSError:
            return f"the {self._command} is starting"

    def _reason(self, error: urllib.error.HTTPError) -> str:
        return f"the {self._command} answers {error.code}"

    def stop(self) -> int:
        """Send SIGTERM, and SIGKILL after 20 seconds. Return the exit status."""
        assert self._process is not None, "not started"
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed
                return self._process.wait(20.0)
            self._process.kill()
        return self._process.wait()

    def log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class LocalGateway(LocalProcess):
    """Run one `headrace gateway` for the length of a `with` block.

    Args:
        log: file for its output.
        host, port: the address on which it listens; port 0 takes a free one.
        settings: the gateway's other settings, by name.
    """

    def __init__(
        self, *, redis_url: str, log: Path, host: str = "127.0.0.1", port: int = 0, **settings: object
    ) -> None:
        self.host = host
        self.port = port or free_port()
        given = {"host": host, "port": self.port, **settings}
        environ = {f"HEADRACE_GATEWAY_{name.upper()}": str(value) for name, value in given.items()}
        environ["HEADRACE_REDIS_URL"] = redis_url
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
        url = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"
        super().__init__("gateway", log=log, environ=environ, url=url, ready="/ready")


class LocalWorker(LocalProcess):
    """Run one `headrace worker` for the length of a `with` block, then drain it.

    Args:
        log: file for its output.
        port: port of metrics and health; 0 takes a free one.
        settings: the worker's other settings, by name.
    """

    def __init__(self, *, model: str, redis_url: str, log: Path, port: int = 0, **settings: object) -> None:
        port = port or free_port()
        environ = {
            "HEADRACE_MODEL": model,
            "HEADRACE_REDIS_URL": redis_url,
            "HEADRACE_METRICS_PORT": str(port),
            **{f"HEADRACE_{name.upper()}": str(value) for name, value in settings.items()},
        }
        super().__init__("worker", log=log, environ=environ, url=f"http://127.0.0.1:{port}", ready="/health/ready")

    def _reason(self, error: HTTPError) -> str:
        return str(json.loads(error.read()).get("reason"))
