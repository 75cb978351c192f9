"""Commands that the pages show exist, with the flags that they show: `headrace`, `make` and `python -m`."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import click
import pytest

from headrace_cli.main import _headrace

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md"]
_PLACEHOLDERS = {"...", "COMMAND"}


def code_of(text: str) -> list[str]:
    """The lines of fenced and indented code, and inline code; lines that end in a backslash are joined."""
    text = re.sub(r"\\\n\s*", " ", text)
    fenced = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```[^\n]*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks = [*fenced, *re.findall(r"^    (.*)$", rest, re.MULTILINE), *re.findall(r"`([^`\n]+)`", rest)]
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


def problem_of(line: str) -> str | None:
    """What is wrong with a line that begins with `headrace`; None for other lines."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # prose in inline code
        return None
    if not words or Path(words[0]).name != "headrace" or words[0].endswith("/headrace/"):
        return None
    command: click.Command = _headrace
    context = click.Context(command, info_name="headrace")
    for word in words[1:]:
        if isinstance(command, click.Group) and not word.startswith("-"):
            name = word.partition("|")[0]
            found = command.get_command(context, name)
            if found is None:
                return None if word in _PLACEHOLDERS else f"{line!r}: {command.name} has no command {name!r}"
            command = found
        elif word.startswith("--"):
            flag = word.partition("=")[0]
            known = {"--help", "--version"} | {
                name for option in command.params for name in (*option.opts, *option.secondary_opts)
            }
            if flag not in known:
                return f"{line!r}: {command.name} has no flag {flag}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_exist(page: Path) -> None:
    assert [found for line in code_of(page.read_text(encoding="utf-8")) if (found := problem_of(line))] == []


def test_wrong_commands_are_found() -> None:
    assert problem_of("headrace worker --model x --max-num-seqs 3") is None
    assert problem_of(".venv/bin/headrace queue list --json  # levels") is None
    assert "no flag --max-seqs" in str(problem_of("headrace worker --max-seqs 3"))
    assert "no command 'lisst'" in str(problem_of("headrace queue lisst"))
    assert code_of("`a b`\n\n    headrace top \\\n        --once\n\n```\nmake demo\n```\n") == [
        "make demo",
        "headrace top  --once",
        "a b",
    ]


def test_the_make_targets_of_the_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    shown = {
        target
        for page in PAGES
        for line in code_of(page.read_text(encoding="utf-8"))
        for match in [re.match(r"(?:[A-Z_]+=\S+ )*make ((?:[a-z-]+ ?)+)", line)]
        if match
        for target in match[1].split()
    }
    assert shown - targets == set()


def test_the_modules_of_the_pages_exist() -> None:
    shown = {
        module
        for page in PAGES
        for line in code_of(page.read_text(encoding="utf-8"))
        for module in re.findall(r"python -m (headrace[\w.]+)", line)
    }
    assert shown
    assert [module for module in shown if importlib.util.find_spec(module) is None] == []
