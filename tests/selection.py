"""Which tests a short run leaves out: five sixths of those that are marked as rotated, other ones each time.

`make test` is a short run; `make test-all` and plain pytest run every test. The marks, whose `folders` are paths from
the root of the checkout:

    rotated(*folders)       on tests: a short run takes one sixth of those in a file
    rotated_file(*folders)  on a file: a short run takes one sixth of these files

Tests that start workers of their own, by the fixture make_service, are rotated too: a start takes four seconds, and
the chaos of each short run kills, stops and preempts workers, engines and servers in every way that these tests do.

All of them run after a change in one of `folders`, of the test's file or of the pinned packages. After a change of
more than MOST_CHANGED files this would be nearly all of them, so a short run takes a sixth of each. It does so, too,
where git does not know what has changed.

The sixth follows from the seed of pytest-randomly, which differs from run to run and is printed at the end:
`pytest -p no:xdist --short --randomly-seed=SEED` takes the same tests in the same order.

`python tests/selection.py PATH ...` ends with status 0 if one of the paths has changed, or if git does not know.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Final
from zlib import crc32

import pytest

ROOT: Final = Path(__file__).parents[1]
SHARES: Final = 6
COMMITS: Final = 5
"""How many commits back a short run looks. A longer series is tested before it is pushed."""
MOST_CHANGED: Final = 100
"""Files. A change of more has been tested by `make test-all` before it is pushed."""
PINS: Final = "constraints.txt"


def changed_files(root: Path = ROOT) -> frozenset[str] | None:
    """Return what the last commits, those that are not pushed, and uncommitted work changed: paths from `root`.

    After a push nobody knows how many commits it had. Before it, the branch that HEAD follows tells it.

    Returns:
        None if git does not know, for instance in a clone without history.
    """
    commits = _listed(root, "diff", "--name-only", f"HEAD~{COMMITS}")
    files = _listed(root, "ls-files", "--others", "--exclude-standard")
    if commits is None or files is None:
        return None
    not_pushed = _listed(root, "diff", "--name-only", "@{upstream}...HEAD") or []
    return frozenset(commits + files + not_pushed)


def of_a_short_run(changed: frozenset[str] | None) -> frozenset[str]:
    """Return the changes whose tests all run: none if there are more than MOST_CHANGED, or if they are unknown."""
    return changed if changed is not None and len(changed) <= MOST_CHANGED else frozenset()


def _listed(root: Path, *command: str) -> list[str] | None:
    """Return the names that a command of git lists, None if it fails."""
    done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout.splitlines()


def touches(changed: Iterable[str] | None, folders: Sequence[str]) -> bool:
    """Return whether a changed file is one of `folders` or lies in one. None stands for a change of everything."""
    return changed is None or any(PurePosixPath(name).is_relative_to(folder) for name in changed for folder in folders)


def left_out(items: Sequence[pytest.Item], changed: Iterable[str] | None, seed: int) -> set[pytest.Item]:
    """Return the rotated tests that are not in the share of `seed`. It does not depend on the order of `items`."""
    has_changed = cache(partial(touches, changed))
    groups: dict[str, dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        file = item.path.relative_to(ROOT).as_posix()
        folders = _folders(item, "rotated_file")
        group, member = ("files", file) if folders is not None else (file, item.nodeid)
        if folders is None:
            folders = _folders(item, "rotated")
        if folders is None and "make_service" in getattr(item, "fixturenames", ()):
            folders = ()
        if folders is not None and not has_changed((*folders, file, PINS)):
            groups[group][member].append(item)
    return {
        item
        for name, group in groups.items()
        for number, member in enumerate(sorted(group), crc32(name.encode()))
        if number % SHARES != seed % SHARES
        for item in group[member]
    }


def _folders(item: pytest.Item, name: str) -> tuple[str, ...] | None:
    """Return the folders of the item's mark, None without the mark. UsageError: one of them does not exist."""
    mark = item.get_closest_marker(name)
    if mark is None:
        return None
    for folder in mark.args:
        if not (ROOT / folder).exists():
            raise pytest.UsageError(f"{item.nodeid}: mark {name} names {folder}, which does not exist")
    return mark.args


if __name__ == "__main__":
    sys.exit(not touches(changed_files(), sys.argv[1:]))
