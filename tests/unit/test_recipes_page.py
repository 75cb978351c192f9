"""docs/recipes.md shows the files that `make recipes` runs, and the versions that it installs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "recipes"
FILES = sorted(FOLDER.rglob("*.py"))
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
SHOWN = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))


@pytest.mark.parametrize("name", SHOWN)
def test_the_page_shows_a_file_as_it_is(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == SHOWN[name]


def test_the_page_shows_or_links_each_file() -> None:
    linked = {ROOT / name for name in re.findall(r"\]\(\.\./(examples/recipes/\S+\.py)\)", PAGE)}
    named = linked | {ROOT / name for name in SHOWN} | {FOLDER / "django_answers" / "__init__.py"}
    assert sorted(named) == FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_a_recipe_compiles(path: Path) -> None:
    compile(path.read_text(encoding="utf-8"), path, "exec", dont_inherit=True)


def test_the_page_names_the_versions_that_are_installed() -> None:
    pinned = (ROOT / "tests" / "recipes" / "requirements.txt").read_text(encoding="utf-8")
    assert dict(re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)", pinned, re.MULTILINE)) == dict(
        re.findall(r"^\| (\S+) \| ([\d.]+) \|", PAGE, re.MULTILINE)
    )


def test_the_recipe_of_django_imports_nothing_of_headrace() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FILES if path.parent.name == "django_answers"]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    assert {"celery", "redis.asyncio"} <= names
    assert [name for name in names if name.startswith("headrace")] == []
