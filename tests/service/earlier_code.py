"""The code of an earlier version, from the history of git, for processes beside those of the working tree."""

import io
import os
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_ROOT = Path(__file__).parents[2]
_VARIABLE = "PYTHONPATH"
_PARTS = ("broker", "cli", "engine", "gateway", "monitoring", "wire", "workers")


def extract(commit: str, folder: Path, paths: Sequence[str] = _PARTS) -> bool:
    """Write the packages of a commit or tag, or other paths of it, into the folder. No paths stand for all files.

    Returns:
        False if the history does not have it.
    """
    command = ["git", "-C", str(_ROOT), "archive", commit, *paths]
    archive = subprocess.run(command, capture_output=True, check=False)
    if archive.returncode:
        return False
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return True


class EarlierCode:
    """The packages of a folder, which a process imports in place of the installed ones."""

    def __init__(self, folder: Path) -> None:
        self._path: Final = os.pathsep.join(str(folder / part) for part in _PARTS)

    def is_in(self, environ: Mapping[str, str]) -> bool:
        return environ.get(_VARIABLE, "").startswith(self._path)

    def added_to(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return an environment whose processes import these packages."""
        return {**environ, _VARIABLE: os.pathsep.join(filter(None, [self._path, environ.get(_VARIABLE)]))}

    def removed_from(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return an environment whose processes import the installed packages again."""
        return {**environ, _VARIABLE: environ[_VARIABLE].removeprefix(self._path).removeprefix(os.pathsep)}
