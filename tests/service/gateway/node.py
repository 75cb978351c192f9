"""Programs of Node.js with packages from the registry."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest


def install(folder: Path, *packages: str) -> Path:
    """Install the packages into the folder; skip the test where there is no Node.js or no registry."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no Node.js is installed; `make ops-tools` gets it where it can be had")
    quiet = ["--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0", "--prefix", str(folder)]
    done = subprocess.run([npm, "install", *quiet, *packages], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"npm could not install {' '.join(packages)}: {done.stderr[-300:]}")
    return folder


def run(folder: Path, program: str, *arguments: str) -> dict[str, Any]:
    """Run the program beside its modules, and return the JSON that it prints."""
    (folder / "client.mjs").write_text(program, encoding="utf-8")
    command = ["node", "client.mjs", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    out: dict[str, Any] = json.loads(done.stdout)
    return out
