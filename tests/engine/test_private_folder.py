"""Folders of this user alone, for files that are run or believed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from headrace_engine.runner.cuda.device import keep_kernels_private
from headrace_engine.system.private_folder import check_private, first_private, make_private


def test_what_is_missing_is_made_for_this_user_alone(tmp_path: Path) -> None:
    folder = make_private(tmp_path / "a" / "b")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700, 0o700]
    assert make_private(folder) == folder


def test_a_shared_temporary_folder_will_do_as_a_parent_and_not_as_the_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    make_private(tmp_path / "mine")
    with pytest.raises(PermissionError, match="others than its owner may write in"):
        make_private(tmp_path)


def test_nothing_is_made_where_another_user_could_replace_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match=r"others than its owner may write in .* \(mode 777\)"):
        make_private(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_links_are_followed_to_where_they_lead(tmp_path: Path) -> None:
    (tmp_path / "safe").mkdir(mode=0o700)
    (tmp_path / "broad").mkdir()
    (tmp_path / "broad" / "inner").mkdir(mode=0o700)
    (tmp_path / "broad").chmod(0o777)
    (tmp_path / "good").symlink_to("safe/../safe")
    (tmp_path / "bad").symlink_to(tmp_path / "broad" / "inner")
    (tmp_path / "loop").symlink_to("loop")
    check_private(tmp_path / "good", alone=True)
    with pytest.raises(PermissionError, match="broad"):
        check_private(tmp_path / "bad", alone=True)
    with pytest.raises(OSError, match="symbolic links"):
        check_private(tmp_path / "loop")


def test_the_next_place_is_told_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    told: list[str] = []
    assert first_private("models", told.append, environ) == tmp_path / "run" / "headrace" / "models"
    assert "others than its owner may write" in told[0]


def test_a_user_without_a_home_gets_the_next_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    environ = {"XDG_RUNTIME_DIR": str(tmp_path / "run")}
    assert first_private("models", print, environ) == tmp_path / "run" / "headrace" / "models"


def test_tritons_kernels_are_kept_with_ours_unless_the_operator_says_where(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    keep_kernels_private(environ)
    assert Path(environ["TRITON_CACHE_DIR"]).relative_to(tmp_path) == Path("headrace/triton")
    assert os.access(environ["TRITON_CACHE_DIR"], os.W_OK)
    chosen = {"TRITON_CACHE_DIR": "/somewhere"}
    keep_kernels_private(chosen)
    assert chosen == {"TRITON_CACHE_DIR": "/somewhere"}
