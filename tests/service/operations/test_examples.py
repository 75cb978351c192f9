"""Each file of examples/ runs unchanged on a real service, with the rights of the user `client`."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_cli.local.process import LocalGateway
from service.operations.client_snippets import ROOT
from service.redis_users import ServerWithUsers, url_of
from service.workers.conftest import model_folder
from service.workers.service import Service

__all__ = ["model_folder"]

pytestmark = pytest.mark.rotated_file("examples")

FOLDER = ROOT / "examples"
OUTPUTS = {
    "enqueue.py": r"\n\d+ tokens\n",
    "stream.py": r"'A river is.*\n'A lake is.*\n'The sea is.*\n",
    "tenants.py": r"urgent: .* s\nbacklog: 24 answers, \d+ tokens\n",
    "structured_output.py": r"\{'river': '.*', 'length_km': \d+\}\n",
    "http.sh": r"(?s)data: \{.*data: \[DONE\].*\"completion_tokens\"",
    "library.py": r"'The capital of France is.*\n'The largest river is.*\n",
}
"""The output of each, as a regular expression."""


@pytest.fixture(scope="module")
def environment(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("examples")
    with ServerWithUsers(folder) as server:
        service = Service(server, model_folder, folder, url=url_of(server, "admin"))
        try:
            service.start_worker(redis_url=url_of(server, "worker")).wait_ready()
            with LocalGateway(redis_url=url_of(server, "gateway"), log=folder / "gateway.log") as gateway:
                gateway.wait_ready()
                yield {
                    "HEADRACE_REDIS_URL": url_of(server, "client"),
                    "HEADRACE_URL": gateway.url,
                    "MODEL": "tiny",
                    "MODEL_FOLDER": model_folder,
                    "PATH": os.environ["PATH"],
                    "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
                }
            assert service.dead_letters() == []
        finally:
            service.close()


def test_every_example_is_listed_and_run() -> None:
    files = {path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".sh")}
    assert files == set(OUTPUTS)
    assert set(re.findall(r"\]\((\w+\.(?:py|sh))\)", (FOLDER / "README.md").read_text(encoding="utf-8"))) == files


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_example_runs(name: str, environment: dict[str, str], tmp_path: Path) -> None:
    path = FOLDER / name
    command = ["sh", str(path)] if path.suffix == ".sh" else [sys.executable, "-W", "error", str(path)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert re.search(OUTPUTS[name], done.stdout), done.stdout


def test_the_celery_example_imports_nothing_of_headrace() -> None:
    tree = ast.parse((FOLDER / "enqueue.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", None) or node.names[0].name for node in imports}
    assert names == {"os", "celery"}
