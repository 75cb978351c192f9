"""A package's root stays small, and the name of a class or file says which one it is: `docs/package_layout.py`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

_PATH = Path(__file__).parents[2] / "docs" / "package_layout.py"


@pytest.fixture(scope="module")
def package_layout() -> ModuleType:
    spec = importlib.util.spec_from_file_location("package_layout", _PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(root: Path, *files: str, text: str = "") -> None:
    for file in ("a/headrace_a/__init__.py", *files):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)


def test_the_packages_keep_the_rules(package_layout: ModuleType) -> None:
    assert list(package_layout.problems()) == []


def test_a_root_with_sixteen_files_is_found(package_layout: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, *(f"a/headrace_a/m{number}.py" for number in range(14)))
    assert list(package_layout.problems(tmp_path, {}, {})) == []
    write(tmp_path, "a/headrace_a/m14.py")
    assert list(package_layout.problems(tmp_path, {}, {})) == [
        "a/headrace_a must have at most 15 files, got 16: move some into a folder"
    ]


def test_a_name_in_use_twice_is_found_unless_it_is_explained(package_layout: ModuleType, tmp_path: Path) -> None:
    write(
        tmp_path, "a/headrace_a/leases.py", "a/headrace_a/queue/leases.py", text="class Lease: ...\nclass _Own: ...\n"
    )
    write(tmp_path, "a/headrace_a/__init__.py")
    found = list(package_layout.problems(tmp_path, {}, {}))
    assert [each.split(" must ")[0] for each in found] == ["Lease", "leases"]
    assert "a/headrace_a/leases.py, a/headrace_a/queue/leases.py" in found[1]
    assert list(package_layout.problems(tmp_path, {"why": ("Lease",)}, {"why": ("leases",)})) == []


def test_an_explanation_that_is_no_longer_needed_is_found(package_layout: ModuleType, tmp_path: Path) -> None:
    write(tmp_path)
    assert list(package_layout.problems(tmp_path, {"why": ("Gone",)}, {})) == [
        "Gone is the name of one class only: delete it from docs/package_layout.py"
    ]
