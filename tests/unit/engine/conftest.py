"""Children of these tests import the tests' own modules."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def tests_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = Path(__file__).parents[2]
    paths = [str(tests), str(tests.parent / "engine"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
