"""New environments with only the packages that a page or an extra names. Without a network the test is skipped."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from service.operations.client_snippets import ROOT


def pip(folder: Path, *words: str) -> list[str]:
    """Return the command that runs pip for the environment in `folder`, which has no pip."""
    python = str(folder / "bin/python")
    return [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", *words]


def install_pip(folder: Path, words: list[str]) -> None:
    """Run `pip WORDS` in a new environment in `folder`; a word that begins with a dot is this checkout."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    words = [re.sub(r"^\.(?=\[|$)", str(ROOT), word) for word in words]
    # most modules are never imported, and need not be compiled
    quiet = ["--quiet", "--no-input", "--no-compile", "--retries", "1"]
    fetch(pip(folder, words[0], *quiet, *words[1:]), folder)


def fetch(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    text = done.stdout + done.stderr
    if done.returncode and re.search(r"No matching distribution|Connection|ENOTFOUND|EAI_AGAIN|ECONN|network", text):
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, text[-3000:]
