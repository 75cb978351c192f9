"""The files of a version of this repository, as git gives them to a user, and how one replaces another."""

import shutil
import subprocess
from pathlib import Path

from service.earlier_code import extract
from stack.daemon import Skipped
from stack.registries import ROOT


def working_tree(folder: Path) -> Path:
    """Copy the files that git knows, with uncommitted changes and new files. Return the folder."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():  # a deleted file is listed, too
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def commit(name: str, folder: Path) -> Path:
    """Write the files of a commit or tag. Return the folder.

    Raises:
        Skipped: the history does not have it.
    """
    if not extract(name, folder, ()):
        raise Skipped(f"the history of git has no commit {name}")
    return folder


def replace(files: Path, folder: Path, before: Path | None = None) -> None:
    """Put the files of a version into a folder, and remove what only the version before it had, as git does.

    Other files stay, such as .env. So do folders that both versions have: containers have mounted them.
    """
    new = _names(files)
    for name in new:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(files / name, folder / name)
    for name in (_names(before) if before is not None else set()) - new:
        (folder / name).unlink()
        for parent in name.parents:
            if any((folder / parent).iterdir()):
                break
            (folder / parent).rmdir()
    folder.chmod(0o755)


def _names(files: Path) -> set[Path]:
    return {path.relative_to(files) for path in files.rglob("*") if path.is_file()}
