"""The client snippets of README.md and docs run with only the packages that their pages install.

They have the rights of the user `client` in docker-compose.yml.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace_cli.local.process import LocalGateway
from service.operations.client_snippets import ROOT, Snippet, snippets
from service.operations.fresh_environments import fetch, install_pip
from service.redis_users import ServerWithUsers, url_of
from service.workers.conftest import model_folder
from service.workers.service import Service

pytestmark = pytest.mark.rotated_file("examples", "README.md", "docs/enqueue.md", "docs/quickstart.md", "docs/wire.md")

__all__ = ["model_folder"]

SNIPPETS = snippets()
_OUTSIDE = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT", "SSL_CERT_FILE", "PATH", "HOME")

Install = Callable[[str], Path]


@pytest.fixture(scope="module")
def service(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("snippets")
    with ServerWithUsers(folder) as server:
        made = Service(server, model_folder, folder, url=url_of(server, "admin"))
        try:
            made.start_worker(redis_url=url_of(server, "worker")).wait_ready()
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def gateway(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    folder = tmp_path_factory.mktemp("gateway")
    files = folder / "files"
    files.mkdir()
    with LocalGateway(redis_url=url_of(service.server, "gateway"), log=folder / "log", files=files) as made:
        made.wait_ready()
        yield made


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory) -> Install:
    """Return a function that runs a page's install command in an empty folder, once each, and returns the folder."""
    folders: dict[str, Path] = {}

    def run(command: str) -> Path:
        if command not in folders:
            folder = tmp_path_factory.mktemp("client")
            words = shlex.split(command)
            if words[0] == "npm":
                _install_npm(folder, words[1:])
            else:
                assert words[0] == "pip"
                install_pip(folder, words[1:])
            folders[command] = folder
        return folders[command]

    return run


def _install_npm(folder: Path, words: list[str]) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("Node.js is not installed; `make ops-tools` installs it if it can")
    quiet = ["--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0", "--prefix", str(folder)]
    fetch([npm, words[0], *quiet, *words[1:]], folder)


def _run(snippet: Snippet, code: str, folder: Path) -> str:
    environ = {name: os.environ[name] for name in _OUTSIDE if name in os.environ}
    if snippet.language == "python":
        command = [str(folder / "bin/python"), "-W", "error::DeprecationWarning:__main__", "-c", code]
    else:
        assert snippet.language == "javascript"
        (folder / "snippet.js").write_text(code, encoding="utf-8")
        command = ["node", "snippet.js"]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, encoding="utf-8", timeout=180, check=False
    )
    assert done.returncode == 0, f"{snippet.where}:\n{done.stderr[-3000:]}"
    return done.stdout


def test_every_kind_of_client_has_a_snippet() -> None:
    installs = {(snippet.install, snippet.language) for snippet in SNIPPETS}
    assert ('pip install "celery[redis]"', "python") in installs
    assert ("pip install .", "python") in installs
    assert ("pip install openai", "python") in installs
    assert {language for install, language in installs if install.startswith("npm")} == {"javascript"}


def test_the_curl_line_of_the_quickstart_works(service: Service, gateway: LocalGateway) -> None:
    quickstart = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^curl -N .*\\\n.*$", quickstart, re.MULTILINE)
    line = line.replace("http://127.0.0.1:8000", gateway.url).replace("smollm2-135m-instruct", "tiny")
    answer = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=120, check=True)
    assert answer.stdout.rstrip().endswith("data: [DONE]"), answer.stdout
    service.wait_settled()


def test_every_snippet_of_a_client_is_marked_as_one_or_names_what_runs_it() -> None:
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"(?P<before>[^\n]*)\n```(python|javascript)\n(?P<code>.*?)```", text, re.DOTALL):
            if re.search(r"Client\(|Celery\(|redis://|OpenAI\(|Anthropic\(", match["code"]):
                marks = ("<!-- client: ", "<!-- file: ", "<!-- as in tests/")
                assert match["before"].startswith(marks), f"{path.name}:\n{match['code']}"


@pytest.mark.parametrize("number", range(len(SNIPPETS)), ids=[snippet.where for snippet in SNIPPETS])
def test_a_snippet_runs_with_the_packages_that_its_page_installs(
    service: Service, gateway: LocalGateway, install: Install, number: int
) -> None:
    snippet = SNIPPETS[number]
    url = url_of(service.server, "client")
    if snippet.language == "javascript":
        url += "?allowUsernameInURI=true"  # as docs/enqueue.md says
    code = snippet.code_for(url, gateway.url, "tiny")
    if snippet.language == "python" and "import " not in code:  # it continues the one before
        code = SNIPPETS[number - 1].code_for(url, gateway.url, "tiny") + code
    folder = install(snippet.install)
    assert _run(snippet, code, folder).strip()
    service.wait_settled()
    assert service.dead_letters() == []
