"""docs/engines.md names every field that passes between a worker and its engine."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from headrace_engine.core import frames
from headrace_engine.core.outputs import EngineCoreOutput
from headrace_engine.options.capabilities import EngineCapabilities
from headrace_engine.requests.request import EngineCoreRequest

PAGE = (Path(__file__).parents[3] / "docs" / "engines.md").read_text()


def names_of(heading: str) -> list[str]:
    """The names in the first columns of the tables below a heading, in their order."""
    section = PAGE.partition(f"# {heading}\n")[2].partition("\n#")[0]
    rows = re.findall(r"^\| (.+?) \|", section, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


@pytest.mark.parametrize(("heading", "kind"), [("A request", EngineCoreRequest), ("A step", EngineCoreOutput)])
def test_fields_are_documented_in_their_order(heading: str, kind: type) -> None:
    assert names_of(heading) == [field.name for field in fields(kind)]


def test_every_capability_is_documented() -> None:
    assert sorted(names_of("Capabilities")) == sorted(field.name for field in fields(EngineCapabilities))


def test_every_frame_is_documented() -> None:
    assert frames.__doc__ is not None
    known = set(re.findall(r'\["(\w+)"', frames.__doc__))
    section = PAGE.partition("## Frames")[2].partition("### A request")[0]
    assert known == set(re.findall(r"^\| [^|]*\| `(\w+)` \|", section, re.MULTILINE))
