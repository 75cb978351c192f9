"""The unmodified docker-compose.yml, as a user runs it: by `docker compose` in a copy of this repository."""

import json
import re
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from stack.daemon import environment
from stack.progress import progress
from stack.versions import replace

PROJECT: Final = "headrace-stack"
BUILT: Final = ("worker", "gateway", "exporter")
SERVICES: Final = ("redis", "worker", "gateway", "exporter", "prometheus", "grafana")
USERS_LINE: Final = "  user exporter on "  # a line of the compose file's users of Redis
_READY_SECONDS: Final = 420


class StackError(Exception):
    """The stack did not do what its documentation says."""


class Stack:
    """The services of the compose file, on one daemon."""

    def __init__(self, files: Path, folder: Path, docker_environment: dict[str, str], network: str | None) -> None:
        """Put a version into a folder.

        Args:
            files: the files of the version.
            folder: the new folder.
            docker_environment: what the docker command needs to find the daemon.
            network: the network in which images are built, None for that of the compose file.
        """
        self.folder = folder
        self._environment = environment(**docker_environment, COMPOSE_PROJECT_NAME=PROJECT, COMPOSE_PROGRESS="plain")
        self._inside: list[str] = []
        self._key = ""
        self._network = network
        self._files = files
        replace(files, folder)

    def change_version(self, files: Path) -> None:
        """Put another version in place, as docs/upgrade.md says. What runs stays."""
        replace(files, self.folder, self._files)
        self._files = files
        self.make_env()

    def use_inside(self, inside: list[str]) -> None:
        """Set the prefix of commands that run in the daemon's network."""
        self._inside = inside

    def prepare(self, model: Path, name: str) -> None:
        """Write .env by make-env, with the model's folder and name."""
        self.make_env()
        values = {"HEADRACE_MODEL_DIR": str(model), "HEADRACE_SERVED_MODEL_NAME": name}
        with (self.folder / ".env").open("a") as file:
            file.writelines(f"{variable}={value}\n" for variable, value in values.items())

    def make_env(self) -> None:
        self._run(["deploy/compose/make-env"])

    def build(self) -> dict[str, int]:
        """Build the images. Return their sizes in bytes."""
        files = ["-f", "docker-compose.yml"]
        if self._network is not None:
            override = self.folder.parent / "build.json"
            networks = {name: {"build": {"network": self._network}} for name in BUILT}
            override.write_text(json.dumps({"services": networks}))
            files += ["-f", str(override)]
        self._run(["docker", "compose", *files, "build", *BUILT])
        sizes = {}
        for name in BUILT:
            sizes[name] = int(self._run(["docker", "image", "inspect", "--format", "{{.Size}}", f"{PROJECT}-{name}"]))
        return sizes

    def make_key(self) -> None:
        """Make a key for the gateway, as docs/deployment.md says."""
        command = ["docker", "compose", "run", "-T", "--rm", "--no-deps", "--entrypoint", "headrace", "gateway"]
        done = self._completed([*command, "gateway-key", "website"])
        (self.folder / "keys" / "keys.toml").write_text(done.stdout)
        found = re.search(r"sk-headrace-\S+", done.stderr)
        if found is None:
            raise StackError(f"gateway-key showed no key: {done.stderr}")
        self._key = found[0]

    def up(self) -> None:
        """Start what does not run, and what has changed, and wait until all services are healthy."""
        self.compose("up", "--detach", "--no-build", "--wait", "--wait-timeout", str(_READY_SECONDS))

    def down(self) -> None:
        self._completed(
            ["docker", "compose", "down", "--volumes", "--remove-orphans", "--rmi", "local", "--timeout", "10"],
            check=False,
        )

    def compose(self, *arguments: str) -> str:
        return self._run(["docker", "compose", *arguments])

    def inspect(self, service: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(
            self._run(["docker", "inspect", self.compose("ps", "--all", "-q", service).strip()])
        )
        return found[0]

    def kill(self, service: str) -> None:
        """Kill a service's first process from outside, so that the restart policy has to start it again."""
        pid = self.inspect(service)["State"]["Pid"]
        code = f"import os, signal; os.kill({pid}, signal.SIGKILL)"
        image = f"{PROJECT}-gateway"
        container = [
            "docker",
            "run",
            "--rm",
            "--pid",
            "host",
            "--user",
            "0",
            "--network",
            "none",
            "--entrypoint",
            "python",
        ]
        self._run([*container, image, "-c", code])

    def restart_count(self, service: str) -> int:
        return int(self.inspect(service)["RestartCount"])

    def started_at(self, service: str) -> float:
        """Return the Unix time at which a service's container was started."""
        return datetime.fromisoformat(self.inspect(service)["State"]["StartedAt"]).timestamp()

    def wait_until_restarted(self, service: str, restarts: int) -> None:
        """Wait until the restart policy has started a service more often than `restarts`, and it is healthy."""
        end = time.monotonic() + _READY_SECONDS
        while True:
            found = self.inspect(service)
            state = found["State"]
            if found["RestartCount"] > restarts and state["Running"] and state["Health"]["Status"] == "healthy":
                return
            if time.monotonic() > end:
                raise StackError(f"{service} was not restarted and healthy in {_READY_SECONDS} s: {state}")
            time.sleep(0.5)

    def seconds_until_the_worker_was_ready(self) -> float:
        """Return the seconds from the start of the worker's container to its log line that the engine is ready."""
        state = self.inspect("worker")["State"]
        log = self.compose("logs", "--no-log-prefix", "--since", state["StartedAt"], "worker")
        for line in log.splitlines():
            if line.startswith("{") and "engine ready" in (record := json.loads(line))["event"]:
                began = datetime.fromisoformat(state["StartedAt"])
                return (datetime.fromisoformat(record["timestamp"]) - began).total_seconds()
        raise StackError("the worker's log does not say that the engine is ready")

    def send_by_celery(self, count: int, tokens: int, seconds: float) -> subprocess.Popen[str]:
        """Start plain Celery in a container, as the user `client` of Redis, in the network of the services."""
        values = dict(line.split("=", 1) for line in (self.folder / ".env").read_text().splitlines())
        url = f"redis://client:{values['REDIS_CLIENT_PASSWORD']}@redis:6379/0"
        variables = {"REDIS_URL": url, "MODEL": values["HEADRACE_SERVED_MODEL_NAME"]}
        command = [
            "docker",
            "run",
            "--rm",
            "-i",
            "--no-healthcheck",
            "--network",
            f"{PROJECT}_backend",
            "--entrypoint",
            "python",
        ]
        command += [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        script = Path(__file__).with_name("celery_requests.py")
        with script.open() as source:
            return self._start([*command, f"{PROJECT}-gateway", "-", str(count), str(tokens), str(seconds)], source)

    def send_over_http(self, count: int, tokens: int, seconds: float, model: str) -> subprocess.Popen[str]:
        """Start clients of the gateway's published port, in the daemon's network."""
        script = Path(__file__).with_name("http_requests.py")
        arguments = ["http://127.0.0.1:8000", self._key, model, str(count), str(tokens), str(seconds)]
        return self._start([*self._inside, sys.executable, str(script), *arguments])

    def change_users(self, line: str) -> None:
        """Add a user of Redis to the compose file, as an upgrade of it would."""
        file = self.folder / "docker-compose.yml"
        text = file.read_text()
        assert text.count(USERS_LINE) == 1
        file.write_text(text.replace(USERS_LINE, f"  {line}\n{USERS_LINE}"))

    def succeeds(self, service: str, command: str) -> tuple[bool, str]:
        """Run a shell command in a service's container. Return whether it succeeded, and its output."""
        done = self._completed(["docker", "compose", "exec", "-T", service, "sh", "-c", command], check=False)
        return done.returncode == 0, done.stdout

    def logs(self) -> str:
        return self._completed(["docker", "compose", "logs", "--no-color", "--tail", "10"], check=False).stdout

    def _start(self, command: list[str], source: Any = subprocess.DEVNULL) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=self.folder, env=self._environment, stdin=source, stdout=subprocess.PIPE, text=True
        )

    def _run(self, command: list[str]) -> str:
        return self._completed(command).stdout

    def _completed(self, command: list[str], check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True, check=False
        )
        if check and done.returncode:
            raise StackError(f"`{' '.join(command)[:300]}` failed: {(done.stderr + done.stdout)[-3000:]}")
        return done


def show_logs(stack: Stack) -> None:
    """Show the ends of all logs, when something went wrong."""
    for line in stack.logs().splitlines():
        progress(line[:300])
