"""A short run takes one sixth of the rotated tests, and all whose folders have changed."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from selection import COMMITS, MOST_CHANGED, ROOT, SHARES, changed_files, left_out, of_a_short_run


@dataclass(eq=False)
class Item:
    """What the selection reads of pytest's items."""

    name: str
    file: str = "tests/unit/test_selection.py"
    marks: dict[str, pytest.Mark] = field(default_factory=dict)
    fixturenames: tuple[str, ...] = ()

    @property
    def nodeid(self) -> str:
        return f"{self.file}::{self.name}"

    @property
    def path(self) -> Path:
        return ROOT / self.file

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)


def rotated(*folders: str) -> dict[str, pytest.Mark]:
    return {"rotated": pytest.mark.rotated(*folders).mark}


def rotated_file(*folders: str) -> dict[str, pytest.Mark]:
    return {"rotated_file": pytest.mark.rotated_file(*folders).mark}


def parameters(count: int = 13, **marks: pytest.Mark) -> list[Item]:
    return [Item(f"test[{number:02}]", marks=marks or rotated("tests")) for number in range(count)]


def kept(items: list[Item], seed: int, changed: list[str] | None) -> list[Item]:
    without = left_out(items, changed, seed)  # type: ignore[type-var, arg-type]
    return [item for item in items if item not in without]


def test_the_shares_of_consecutive_seeds_are_each_a_sixth_and_together_everything() -> None:
    items = parameters()
    shares = [kept(items, seed, []) for seed in range(SHARES)]
    assert {len(share) for share in shares} == {2, 3}
    assert sorted(item.name for share in shares for item in share) == [item.name for item in items]


def test_the_share_does_not_depend_on_the_order_of_collection() -> None:
    items = parameters()
    assert set(kept(items, 4, [])) == set(kept(items[::-1], 4, []))


def test_tests_without_a_mark_are_always_kept() -> None:
    items = [Item("test"), Item("test[1]")]
    assert all(kept(items, seed, []) == items for seed in range(SHARES))


def test_tests_that_start_workers_of_their_own_are_rotated_without_a_mark() -> None:
    items = [Item(f"test_{number}", fixturenames=("make_service", "tmp_path")) for number in range(SHARES)]
    assert len(kept(items, 2, [])) == 1


def test_a_file_is_not_divided_by_the_marks_of_its_tests() -> None:
    marks = rotated() | rotated_file()
    items = [Item(f"test_{number}", marks=marks, fixturenames=("make_service",)) for number in range(SHARES)]
    assert sorted(len(kept(items, seed, [])) for seed in range(SHARES)) == [0] * (SHARES - 1) + [SHARES]


def test_a_change_that_concerns_a_test_keeps_all() -> None:
    items = parameters(**rotated("engine/headrace_engine"))
    for changed in ("engine/headrace_engine/errors.py", items[0].file, "constraints.txt"):
        assert kept(items, 1, [changed]) == items
    assert kept(items, 1, ["engine/headrace_engine_vllm/child.py", "README.md"]) != items


def test_a_whole_run_keeps_all() -> None:
    items = parameters()
    assert kept(items, 1, None) == items


def test_too_many_changes_and_unknown_ones_keep_a_sixth(tmp_path: Path) -> None:
    assert changed_files(tmp_path) is None
    assert of_a_short_run(None) == frozenset()
    most = frozenset(str(number) for number in range(MOST_CHANGED))
    assert of_a_short_run(most) == most
    assert of_a_short_run(most | {"one more"}) == frozenset()


def test_files_are_kept_or_left_out_as_a_whole() -> None:
    items = [
        Item(f"test_{number}", f"tests/test_{file}.py", rotated_file()) for file in range(SHARES) for number in (1, 2)
    ]
    for seed in range(SHARES):
        share = kept(items, seed, [])
        assert len(share) == 2
        assert len({item.file for item in share}) == 1


def test_a_mark_with_a_folder_that_does_not_exist_is_refused() -> None:
    with pytest.raises(pytest.UsageError, match="mark rotated names engine/gone, which does not exist"):
        kept(parameters(**rotated("engine/gone")), 1, [])


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def commit(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()
        git(folder, "add", name)
        git(folder, "commit", "-m", name)


def test_the_last_commits_those_not_pushed_and_other_files_are_changes(tmp_path: Path) -> None:
    first, clone = tmp_path / "first", tmp_path / "clone"
    git(tmp_path, "init", "-b", "main", str(first))
    pushed = [f"pushed-{number}" for number in range(COMMITS + 1)]
    commit(first, *pushed)
    assert changed_files(first) == set(pushed[1:])
    git(tmp_path, "clone", str(first), str(clone))
    mine = [f"mine-{number}" for number in range(COMMITS + 2)]
    commit(clone, *mine)
    (clone / "new").touch()
    assert changed_files(clone) == {*mine, "new"}
