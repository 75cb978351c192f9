"""Environments of the matrix: made once, and kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from matrix.cells import Cell

ROOT: Final = Path(__file__).parents[2]
_SHOWN: Final = {"python": ("headrace", "torch"), "torch": ("torch", "transformers"), "celery": ("celery", "kombu")}
"""By the first word of a cell: the packages whose versions the table has."""


class NotHereError(Exception):
    """This machine cannot have the environment."""


def interpreter(version: str) -> Path:
    """Return a Python of this version from PATH or from pyenv. Raises NotHereError."""
    candidates = [shutil.which(f"python{version}") or ""]
    candidates += map(
        str,
        sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions").glob(f"{version}.*/bin/python")),
    )
    for candidate in filter(None, candidates):
        asked = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return Path(candidate)
    raise NotHereError(f"no python{version} on PATH or in pyenv")


def make(folder: Path, packages: tuple[str, ...], version: str) -> Path:
    """Return the interpreter of the environment in `folder`, which is made if it is missing. Raises NotHereError."""
    python, mark = folder / "bin" / "python", folder / ".installed"
    if mark.exists() and mark.read_text() == " ".join(packages):
        return python
    shutil.rmtree(folder, ignore_errors=True)
    base = interpreter(version) if version else Path(sys.executable)
    subprocess.run([base, "-m", "venv", folder], check=True)
    words = [f"-e{each}" if each.startswith(".") else each for each in packages]
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(install, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotHereError(done.stderr.strip().splitlines()[-1])
    mark.write_text(" ".join(packages))
    return python


def versions(python: Path, cell: Cell) -> str:
    """Return the versions that the table shows."""
    if cell.server:
        asked = [cell.server, "--version"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().partition(" sha")[0]
    names = _SHOWN[cell.what.split()[0].lower()]
    code = (
        "import platform\nfrom importlib.metadata import version\n"
        f"print('Python', platform.python_version(), *(f'{{name}} {{version(name)}}' for name in {names!r}), sep=', ')"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip().replace("Python, ", "Python ", 1)
