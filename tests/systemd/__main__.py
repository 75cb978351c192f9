"""The units of deploy/systemd under a booted systemd: `make systemd`, as root.

Makes a Debian of some gigabytes in build/systemd, once, and installs this checkout in it as the units' first lines say.
Boots its systemd in namespaces of its own, and starts the three units. Network and Redis are those of this machine.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace_broker.server.embedded import EmbeddedServer, free_port
from headrace_engine.checkpoints import default_model

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDER = CHECKOUT / "build" / "systemd"
ROOT = FOLDER / "root"
PACKAGES = "systemd,systemd-sysv,dbus,python3-venv,ca-certificates,gcc,libc6-dev"
UNITS = ("headrace-worker", "headrace-gateway", "headrace-exporter")
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
SOURCES = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE")
PARTS = ("wire", "engine", "broker", "workers", "gateway", "cli", "monitoring")
PATIENCE = 300.0
CONSOLE = Console(highlight=False)


def main() -> None:
    reason = why_not()
    if reason is not None:
        CONSOLE.print(f"skipped: {reason}")
        return
    make_root()
    with EmbeddedServer() as server, booted() as systemd:
        ports = {unit: free_port() for unit in UNITS}
        key = configure(systemd, server.url, ports)
        systemd.call("systemctl", "daemon-reload")
        systemd.call("systemctl", "start", *UNITS)
        try:
            check(systemd, ports, key)
        except BaseException:
            CONSOLE.out(systemd.call("journalctl", "--no-pager", "-n", "60", "-o", "cat"))
            raise


def why_not() -> str | None:
    """Return the reason why no systemd can be booted here."""
    if os.geteuid() != 0:
        return "it needs root, for namespaces and mounts"
    missing = [name for name in ("mmdebstrap", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (apt install mmdebstrap util-linux)"
    if not any(Path(f"/sys/fs/cgroup/{name}").exists() for name in ("cgroup.controllers", "systemd")):
        return "no control groups that systemd can use are mounted"
    return None


def make_root() -> None:
    """Make the Debian and install the checkout, as the units' first lines say. Both are kept for the next run."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not (ROOT / "lib/systemd/systemd").exists():
        shutil.rmtree(ROOT, ignore_errors=True)
        run("mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(ROOT))
    source = ROOT / "src"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    for name in SOURCES:
        shutil.copy(CHECKOUT / name, source)
    for name in PARTS:
        shutil.copytree(CHECKOUT / name, source / name, symlinks=True)
    for path in ("/etc/resolv.conf", "/etc/pip.conf"):
        if Path(path).exists():
            shutil.copy(path, ROOT / path[1:])
    shutil.copy(os.environ.get("PIP_CERT") or CERTIFICATES, ROOT / CERTIFICATES[1:])  # also of an index of one's own
    cert = ["env", f"PIP_CERT={CERTIFICATES}", f"SSL_CERT_FILE={CERTIFICATES}"]
    pip = [*cert, "/opt/headrace/bin/pip", "install", "--quiet", "--disable-pip-version-check"]
    if not (ROOT / "opt/headrace/bin/headrace").exists():
        run("chroot", str(ROOT), "python3", "-m", "venv", "/opt/headrace")
        run("chroot", str(ROOT), *pip, "--constraint", "/src/constraints.txt", "/src[worker,gateway]")
    run("chroot", str(ROOT), *pip, "--no-deps", "--force-reinstall", "/src")
    if not (ROOT / "srv/model").exists():
        shutil.copytree(default_model.fetch(), ROOT / "srv/model")
        run("chmod", "-R", "a+rX", str(ROOT / "srv"))
    if "headrace:" not in (ROOT / "etc/passwd").read_text():
        user = ["useradd", "--system", "--home-dir", "/var/lib/headrace", "--shell", "/usr/sbin/nologin", "headrace"]
        run("chroot", str(ROOT), *user)
    for unit in UNITS:
        shutil.copy(CHECKOUT / "deploy/systemd" / f"{unit}.service", ROOT / "etc/systemd/system")


def run(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


class Systemd:
    """The booted systemd, whose process 1 is `pid` here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def call(self, *command: str) -> str:
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--ipc", "--uts", "--"]
        return subprocess.run([*enter, *command], stdout=subprocess.PIPE, text=True, check=False).stdout.strip()

    def show(self, unit: str, name: str) -> str:
        return self.call("systemctl", "show", "--property", name, "--value", unit)


@contextlib.contextmanager
def booted() -> Iterator[Systemd]:
    """Boot the systemd of the root; end it and all its processes afterwards."""
    is_v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = Path("/sys/fs/cgroup") / ("." if is_v2 else "systemd") / f"headrace-systemd-{os.getpid()}"
    group.mkdir()
    boot = [str(Path(__file__).with_name("boot.sh")), str(ROOT), "v2" if is_v2 else "v1"]
    spaces = "--mount --pid --fork --ipc --uts --cgroup --kill-child"
    enter = f'echo $$ > {group}/cgroup.procs; exec unshare {spaces} sh "$@"'
    with (FOLDER / "boot.log").open("wb") as log:
        starter = subprocess.Popen(["sh", "-c", enter, "sh", *boot], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        children = Path(f"/proc/{starter.pid}/task/{starter.pid}/children")
        first = wait_for(lambda: children.read_text().split())
        systemd = Systemd(int(first[0]))
        wait_for(lambda: systemd.call("systemctl", "is-system-running") in ("running", "degraded"))
        yield systemd
    finally:
        starter.send_signal(signal.SIGKILL)  # its child, process 1, ends with it, and with process 1 all others
        starter.wait()
        wait_for(lambda: remove(group))


def remove(group: Path) -> bool:
    """Remove a control group and its children. Returns False while one of them has a process."""
    try:
        for folder in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
            folder.rmdir()
        group.rmdir()
    except OSError:
        return False
    return True


def configure(systemd: Systemd, redis_url: str, ports: dict[str, int]) -> str:
    """Write the environment files and the key file that the units name. Returns the key."""
    folder = ROOT / "etc/headrace"
    folder.mkdir(exist_ok=True)
    own = {
        "worker": {
            "HEADRACE_MODEL": "/srv/model",
            "HEADRACE_SERVED_MODEL_NAME": "tiny",
            "HEADRACE_METRICS_PORT": ports[UNITS[0]],
        },
        "gateway": {
            "HEADRACE_GATEWAY_PORT": ports[UNITS[1]],
            "HEADRACE_GATEWAY_FILES": "/var/lib/headrace-gateway",
        },
        "exporter": {"HEADRACE_EXPORTER_PORT": ports[UNITS[2]]},
    }
    for name, variables in own.items():
        lines = (f"{key}={value}\n" for key, value in {"HEADRACE_REDIS_URL": redis_url, **variables}.items())
        (folder / f"{name}.env").write_text("".join(lines))
        (folder / f"{name}.env").chmod(0o600)
    made = ["chroot", str(ROOT), "/opt/headrace/bin/headrace", "gateway-key", "website"]
    done = subprocess.run(made, capture_output=True, text=True, check=True)
    (folder / "keys.toml").write_text(done.stdout)
    systemd.call("chgrp", "headrace", "/etc/headrace/keys.toml")
    (folder / "keys.toml").chmod(0o640)
    return done.stderr.split()[-1]


def check(systemd: Systemd, ports: dict[str, int], key: str) -> None:
    """Start, answer, recover from a kill, and drain."""
    worker, gateway, exporter = UNITS
    probes = {worker: "/health/ready", gateway: "/ready", exporter: "/health/ready"}

    def are_ready() -> bool:
        return all(status(ports[unit], path) == 200 for unit, path in probes.items())

    began = time.monotonic()
    wait_for(are_ready)
    CONSOLE.print(f"{'ready':44} {time.monotonic() - began:6.1f} s")
    answer = chat(ports[gateway], key, 8)
    assert answer["usage"]["completion_tokens"] == 8, answer
    for unit in UNITS:
        pid = systemd.show(unit, "MainPID")
        fields = dict(line.split(":\t", 1) for line in systemd.call("cat", f"/proc/{pid}/status").splitlines())
        assert (int(fields["CapBnd"], 16), fields["NoNewPrivs"], fields["Seccomp"]) == (0, "1", "2"), unit
        assert fields["Uid"].split()[0] != "0", unit
    for unit in UNITS:
        began = time.monotonic()
        systemd.call("systemctl", "kill", "--signal=KILL", unit)
        wait_for(lambda unit=unit: systemd.show(unit, "NRestarts") == "1")  # type: ignore[misc]
        wait_for(are_ready)
        CONSOLE.print(f"{unit + ' killed, ready again':44} {time.monotonic() - began:6.1f} s")
    began = time.monotonic()
    systemd.call("systemctl", "stop", *UNITS)
    for unit in UNITS:
        assert systemd.show(unit, "Result") == "success", unit
    assert '"event": "drain finished"' in systemd.call("journalctl", "--no-pager", "-u", worker, "-o", "cat")
    CONSOLE.print(f"{'drained and stopped':44} {time.monotonic() - began:6.1f} s")


def status(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return int(answer.status)
    except OSError:
        return 0


def chat(port: int, key: str, max_tokens: int) -> dict[str, Any]:
    body = {"model": "tiny", "max_tokens": max_tokens, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), headers=headers
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {PATIENCE:g} s")
        time.sleep(0.2)
    return found


if __name__ == "__main__":
    sys.exit(main())
