"""Cut the changelog of a release: what is under "Unreleased" becomes the section of the version."""

from __future__ import annotations

import re

_NEXT = "## [Unreleased]\n\n"


def cut(text: str, version: str, date: str) -> str:
    """Return the changelog with a section `## [version] - date`. Nothing changes if it has the section already.

    Raises ValueError if there is no section "Unreleased", or if it is empty.
    """
    if re.search(rf"(?m)^## \[{re.escape(version)}\]", text):
        return text
    before, found, after = text.partition(_NEXT)
    # a paragraph that only speaks of an unreleased version
    after = re.sub(r"\ANothing has been released yet\.[^\n]*\n\n", "", after)
    if not found or not after.strip() or after.startswith("## ["):
        raise ValueError("CHANGELOG.md must have entries under ## [Unreleased]")
    return f"{before}{_NEXT}## [{version}] - {date}\n\n{after}"


def notes(text: str, version: str) -> str:
    """Return the entries of a version. Raises ValueError if there are none."""
    found = re.search(rf"(?ms)^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## \[|\Z)", text)
    if found is None:
        raise ValueError(f"CHANGELOG.md has no section {version}")
    return found[1].strip() + "\n"
