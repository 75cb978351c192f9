"""docs/reference is what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

_PATH = Path(__file__).parents[2] / "docs" / "reference" / "generate.py"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_reference", _PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_those_of_the_code(generate: ModuleType) -> None:
    assert generate.stale() == [], f"write them again: {generate.COMMAND}"


def test_a_changed_and_a_missing_page_are_stale(generate: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    for name, text in generate.pages().items():
        (tmp_path / name).write_text(text)
    assert generate.stale(tmp_path) == []
    cli = tmp_path / "reference/cli.md"
    cli.write_text(cli.read_text().replace("--max-num-seqs", "--max-seqs"))
    (tmp_path / "reference/errors.md").unlink()
    assert generate.stale(tmp_path) == ["reference/cli.md", "reference/errors.md"]


def test_every_page_of_the_folder_is_generated(generate: ModuleType) -> None:
    found = {f"reference/{path.name}" for path in _PATH.parent.glob("*.md")}
    assert found == {*generate.pages(), "reference/index.md"} - {"openapi.json"}


def test_no_page_depends_on_the_environment(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADRACE_REDIS_URL", "HEADRACE_GATEWAY_PORT", "HEADRACE_MAX_NUM_SEQS", "COLUMNS"):
        monkeypatch.setenv(name, "77")
    assert generate.stale() == []


def test_every_setting_metric_and_parameter_says_what_it_means(generate: ModuleType) -> None:
    pages = generate.pages()
    rows = [
        line
        for name in ("settings", "metrics", "sampling-params")
        for line in pages[f"reference/{name}.md"].splitlines()
    ]
    assert [row for row in rows if row.startswith("| `") and row.endswith("|  |")] == []
