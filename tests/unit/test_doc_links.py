"""Links between the Markdown files of the repository lead somewhere, as GitHub shows them.

`make docs` checks the site; this checks README.md and the other files that are no part of it, too.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(<?([^)\s>]+)>?\)")
_INLINE_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def _pages() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:  # not a checkout, as in a source archive
        return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    return sorted(ROOT / name for name in listed.stdout.decode().split("\n") if name and (ROOT / name).is_file())


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings by GitHub's rule."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?)\s*$", _FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", _INLINE_LINK.sub(r"\1", heading).lower()).replace(" ", "-")
        number, name = 0, plain
        while name in found:
            number += 1
            name = f"{plain}-{number}"
        found.add(name)
    return found


def broken_links(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    broken = []
    for link in _LINK.findall(re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text(encoding="utf-8")))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8"))
        ):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", _pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `word`, two\n## A word two\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](other.md) [b](other.md#a-word-two) [c](other.md#a-word-two-1) [d](#here)\n"
        "```\n[in code](nowhere.md)\n```\n[e](nowhere.md) [f](other.md#nowhere) [g](#nowhere) [h](https://example.org)\n"
    )
    assert broken_links(page) == ["nowhere.md", "other.md#nowhere", "#nowhere"]


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
