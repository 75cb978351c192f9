"""`GatewayProcess`: a real `headrace gateway` in a process of its own, as an operator would run it."""

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace_broker.server.embedded import free_port

HEADRACE = [sys.executable, "-c", "from headrace_cli.main import main; main()", "gateway"]
PATIENCE = 300.0
"""Seconds; only a failing test takes all of it, but a slow machine may need much of it."""


class GatewayProcess:
    """A replica on loopback; its settings are environment variables without their prefix.

    Args:
        port: where not a free one.
        command: what to run in place of `headrace gateway`.
        environ: other environment variables of it.
    """

    def __init__(
        self,
        *,
        redis_url: str,
        log: Path,
        port: int | None = None,
        command: Sequence[str] = HEADRACE,
        stream_urls: str = "",
        environ: Mapping[str, str] | None = None,
        **settings: object,
    ) -> None:
        self._command = command
        self.log = log
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        environ = inherited | dict(environ or {})
        environ |= {"HEADRACE_REDIS_URL": redis_url, "HEADRACE_GATEWAY_PORT": str(self.port)}
        environ |= {"HEADRACE_STREAM_URLS": stream_urls} if stream_urls else {}
        environ |= {f"HEADRACE_GATEWAY_{name.upper()}": str(value) for name, value in settings.items()}
        self.environ = environ
        self.metrics_port = settings.get("metrics_port")
        self.start()

    def start(self) -> None:
        """Start it, again after it has ended, at the same port."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self._command,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )

    def wait_ready(self) -> "GatewayProcess":
        """Wait until it answers. It may have no worker."""
        deadline = time.monotonic() + PATIENCE
        while self.get("/health") != 200:
            assert self.process.poll() is None, self.log_text()
            assert time.monotonic() < deadline, self.log_text()
            time.sleep(0.02)
        return self

    def get(self, path: str) -> int | None:
        """Return the status of a GET; None if nothing listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return None
        finally:
            connection.close()

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Stop it; fail if it does not exit by itself."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
