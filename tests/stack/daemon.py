"""The Docker daemon: the user's own where it has the real base images, else one in a network namespace of its own.

The daemon of this program keeps its images, its socket and its state in a scratch folder. Its bridges, its NAT rules
and the ports that it publishes are in its namespace, so the machine's own network stays as it is.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Final, Literal

from stack.progress import progress

PROGRAMS: Final = ("dockerd", "docker", "iptables", "ip", "mmdebstrap", "unshare", "nsenter")
_DISK_BYTES: Final = 8 * 10**9
_START_SECONDS: Final = 60
_STOP_SECONDS: Final = 60


class Skipped(Exception):
    """The stack cannot run on this machine. The message says why."""


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment without what would change the compose file's values."""
    ours = ("HEADRACE_", "REDIS_", "GRAFANA_", "COMPOSE_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | changes


def users_daemon(base_image: str) -> str | None:
    """Return why the user's own daemon cannot be used, or None if it can."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    for command in (["docker", "info"], ["docker", "compose", "version"], ["docker", "pull", "--quiet", base_image]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            return f"`{' '.join(command)}` failed: {' '.join(done.stderr.split())[-200:]}"
    return None


class PrivateDaemon:
    """A dockerd of this program. Its data outlives a restart, so what one phase builds another runs."""

    def __init__(self, folder: Path) -> None:
        """Check that one can be started.

        Raises:
            Skipped: it cannot.
        """
        if os.geteuid() != 0:
            raise Skipped("a Docker daemon of its own needs root")
        if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
            raise Skipped(f"a Docker daemon of its own needs {', '.join(missing)}")
        if (free := shutil.disk_usage(folder).free) < _DISK_BYTES:
            raise Skipped(
                f"a Docker daemon of its own needs {_DISK_BYTES / 1e9:.0f} GB in {folder}, {free / 1e9:.1f} are free"
            )
        tried = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True, check=False)
        if tried.returncode:
            raise Skipped(f"this machine makes no namespaces: {tried.stderr.strip()}")
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.socket = f"unix://{folder / 'docker.sock'}"
        self.config = folder / "config"
        (self.config / "cli-plugins").mkdir(parents=True)
        (folder / "daemon.json").write_text("{}")

    def start(self, network: Literal["host", "own"]) -> None:
        """Start it in the machine's network, to build, or in a network of its own, to run.

        Raises:
            Skipped: it does not start here.
        """
        command = ["unshare", "--mount", "--propagation", "private"]
        command += ["--net"] if network == "own" else []
        command += ["sh", "-c", 'ip link set lo up && exec dockerd "$@"', "dockerd"]
        command += ["--config-file", str(self._folder / "daemon.json"), "--data-root", str(self._folder / "data")]
        command += ["--exec-root", str(self._folder / "exec"), "--pidfile", str(self._folder / "docker.pid")]
        command += ["--host", self.socket]
        if network == "host":
            command += ["--bridge=none", "--iptables=false", "--ip6tables=false"]
        log = self._folder / f"dockerd-{network}.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        end = time.monotonic() + _START_SECONDS
        while subprocess.run(["docker", "-H", self.socket, "info"], capture_output=True, check=False).returncode:
            if self._process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise Skipped(f"dockerd does not start: {' '.join(log.read_text()[-600:].split())}")
            time.sleep(0.5)
        place = "in a network namespace of its own" if network == "own" else "in the machine's network, to build"
        progress(f"a Docker daemon runs {place}")

    def inside(self) -> list[str]:
        """Return the command prefix that enters the daemon's network."""
        assert self._process is not None
        return ["nsenter", f"--net=/proc/{self._process.pid}/ns/net"]

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
