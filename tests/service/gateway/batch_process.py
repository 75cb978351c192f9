"""`BatchProcess`: a real `headrace batch run` in a process of its own, as a user would run it."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from service.gateway.gateway_process import PATIENCE

HEADRACE = [sys.executable, "-c", "from headrace_cli.main import main; main()", "batch", "run"]


def write_input(path: Path, bodies: Iterable[dict[str, Any]], url: str = "/v1/chat/completions") -> Path:
    """An input file; the custom ids are `line-0`, `line-1` and so on."""
    lines = (
        {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the answers in a file. Every line must be complete."""
    text = path.read_bytes() if path.exists() else b""
    assert not text or text.endswith(b"\n"), "the last line has no end"
    return [json.loads(line) for line in text.splitlines()]


class BatchProcess:
    """Runs `headrace batch run` in `folder`, with the rest of its command line in `options`.

    Args:
        max_file_bytes: no file of it can become larger, as on a full disk.
        in_background: SIGINT is ignored, as a shell has it for what it starts with `&`.
    """

    def __init__(
        self,
        folder: Path,
        *options: str | Path,
        redis_url: str,
        max_file_bytes: int | None = None,
        in_background: bool = False,
        **rest: Any,
    ) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        # under a limit, Python writes the first bytes of a module's bytecode, which no process could load afterwards
        bytecode = {} if max_file_bytes is None else {"PYTHONDONTWRITEBYTECODE": "1"}

        def prepare() -> None:
            # whatever the shell that runs the tests does with it
            signal.signal(signal.SIGINT, signal.SIG_IGN if in_background else signal.SIG_DFL)
            if max_file_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))

        self.process = subprocess.Popen(
            [*HEADRACE, *map(str, options)],
            cwd=folder,
            env=environ | bytecode | {"HEADRACE_REDIS_URL": redis_url},
            stdin=rest.pop("stdin", subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=prepare,
            **rest,
        )

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds while the process runs."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "it did not come true"
            time.sleep(0.005)

    def end(self, code: int, number: signal.Signals | None = None, given: bytes | None = None) -> tuple[bytes, str]:
        """Send the signal, wait for its end, check the exit code, and return its standard output and errors."""
        if number is not None:
            self.process.send_signal(number)
        output, told = self.process.communicate(given, timeout=2 * PATIENCE)
        assert self.process.returncode == code, told.decode()
        return output, told.decode()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
