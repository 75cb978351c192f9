"""What `make stack` does before a Docker daemon is needed."""

import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from stack.__main__ import base_images
from stack.daemon import Skipped
from stack.registries import ROOT, package_index
from stack.versions import commit, replace

TESTS = Path(__file__).resolve().parents[1]


def test_a_machine_that_can_have_no_daemon_is_skipped_with_the_reason(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "stack"]
    done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reason = done.stdout.splitlines()[-1]
    assert reason.startswith("skipped: a Docker daemon of its own needs ")
    assert reason.endswith(("root", "dockerd, docker, iptables, ip, mmdebstrap, unshare, nsenter"))
    assert list(tmp_path.iterdir()) == []


def test_every_image_that_is_not_ours_has_a_stand_in() -> None:
    assert {path.stem for path in (TESTS / "stack" / "bases").iterdir()} == base_images(ROOT).keys()


def test_pip_finds_a_wheel_by_its_normalised_name(tmp_path: Path) -> None:
    (tmp_path / "Some_Thing-1.0+cpu-py3-none-any.whl").write_bytes(b"wheel")
    with package_index(tmp_path) as url, urllib.request.urlopen(f"{url}some-thing/") as page:
        link = page.read().decode().split('"')[1]
        with urllib.request.urlopen(url.removesuffix("/simple/") + link) as wheel:
            assert wheel.read() == b"wheel"


def test_a_version_that_replaces_another_leaves_the_users_files_and_no_empty_folders(tmp_path: Path) -> None:
    for name, files in {"earlier": ("a/one", "b/c/two"), "later": ("a/one", "c/three")}.items():
        for file in files:
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(name)
    folder = tmp_path / "stack"
    replace(tmp_path / "earlier", folder)
    (folder / ".env").write_text("passwords")
    mounted = (folder / "a").stat().st_ino
    replace(tmp_path / "later", folder, tmp_path / "earlier")
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert found == {".env": "passwords", "a/one": "later", "c/three": "later"}
    assert ((folder / "a").stat().st_ino, (folder / "b").exists()) == (mounted, False)


def test_a_commit_that_git_does_not_have_is_skipped(tmp_path: Path) -> None:
    with pytest.raises(Skipped, match="no commit 0123456789abcdef"):
        commit("0123456789abcdef", tmp_path)
