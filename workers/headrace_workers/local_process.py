"""`LocalProcess`: one of Headrace's own commands on this machine, for as long as a context lasts."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from headrace_broker.embedded import die_with_parent
from headrace_workers.errors import HeadraceWorkerError

START_SECONDS = 180.0


class ProcessStartError(HeadraceWorkerError):
    """The process ended, or was not ready in time; the message has the end of its log."""


class LocalProcess(ABC):
    """A context manager that holds one `headrace COMMAND` with settings of its own.

    The process leads its own group, so a Ctrl-C reaches only the process that holds it, and dies with the thread that
    started it. Leaving the context ends it. Subclasses say how it is told that it is ready.

    Args:
        command: of headrace.
        log: gets its output.
        environ: variables beside this process's own.
    """

    def __init__(self, command: str, *, log: Path, environ: Mapping[str, str]) -> None:
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
                [sys.executable, "-c", "from headrace_workers.cli import main; main()", self._command],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                preexec_fn=die_with_parent,
            )

    def wait_ready(self, timeout: float = START_SECONDS) -> None:
        """Block until it serves. Raises ProcessStartError."""
        for reason in self.readiness(timeout):
            if reason is None:
                return

    def readiness(self, timeout: float = START_SECONDS) -> Iterator[str | None]:
        """Yields why it is not ready, several times a second, and None once it is; then ends."""
        deadline = time.monotonic() + timeout
        while True:
            self.check_alive()
            reason = self._not_ready()
            yield reason
            if reason is None:
                return
            if time.monotonic() > deadline:
                told = f"the {self._command} is not ready after {timeout:g} s ({reason})"
                raise ProcessStartError(f"{told}:\n{self.log_tail()}")
            time.sleep(0.1)

    def check_alive(self) -> None:
        """Raise ProcessStartError where it has ended."""
        assert self._process is not None, "not started"
        status = self._process.poll()
        if status is not None:
            raise ProcessStartError(f"the {self._command} ended with status {status}:\n{self.log_tail()}")

    @abstractmethod
    def _not_ready(self) -> str | None:
        """Why it cannot serve yet; None once it can."""

    def stop(self) -> int:
        """SIGTERM, and SIGKILL after 20 seconds; returns the exit status."""
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
