"""docs/architecture.md names files and functions that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [path.parent for path in sorted(ROOT.glob("*/headrace_*/__init__.py"))]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([\w/]+(?:\.(?:py|lua)|/))(?::(\w+))?`", TEXT)))


def test_the_page_names_files() -> None:
    assert len(NAMED) > 50


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[":".join(filter(None, parts)) for parts in NAMED])
def test_what_is_named_exists(path: str, name: str) -> None:
    found = [file for package in (ROOT, *PACKAGES) for file in [package / path] if file.exists()]
    assert found, f"no package has {path}"
    if name:
        assert any(re.search(rf"^\s*(?:async )?(?:def|class) {name}\b", f.read_text(), re.MULTILINE) for f in found)
