"""Build a release twice, compare the two, and check it: `make release`. Nothing is uploaded, and no tag is made.

The files are built from the last commit, and the working tree must have no other changes. They go to dist/. A wheel
without a platform in its name has the C sources alone; the others have compiled kernels too, and need no compiler.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Final

import changelog
import components
import kernels

ROOT: Final = Path(__file__).parents[1]
DIST: Final = ROOT / "dist"
MACHINES: Final = ("x86_64", "aarch64")


def main() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    commit, seconds = _git("log", "-1", "--format=%H %ct").split()
    if _git("status", "--porcelain"):
        sys.exit("release: the working tree has changes that are not committed: commit or remove them")
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    environ = {**os.environ, "SOURCE_DATE_EPOCH": seconds, "PYTHONDONTWRITEBYTECODE": "1"}
    date = time.strftime("%Y-%m-%d", time.gmtime(int(seconds)))
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory(suffix="-of-the-second-build") as second:
        hashes = [_build(Path(folder), commit, version, date, environ) for folder in (first, second)]
        for path in sorted((Path(first) / "dist").iterdir()):
            shutil.copy(path, DIST)
        shutil.copy(Path(first) / "source" / "CHANGELOG.md", DIST)
    if hashes[0] != hashes[1]:
        different = sorted(name for name in hashes[0] if hashes[0][name] != hashes[1].get(name))
        sys.exit(f"release: two builds differ in {', '.join(different)}")
    print(f"\nTwo builds of {commit[:12]} are equal:")
    for name, digest in hashes[0].items():
        print(f"  {digest}  {(DIST / name).stat().st_size / 1e6:6.2f} MB  {name}")
    (DIST / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in hashes[0].items()))
    _check(version, sorted(hashes[0]))
    print(
        f"\nTo release {version}: commit dist/CHANGELOG.md as CHANGELOG.md, run `make release` again, then\n"
        f"  git tag --annotate v{version} --message 'Headrace {version}'\n"
        f"  twine upload {' '.join('dist/' + name for name in hashes[0])}"
    )


def _build(folder: Path, commit: str, version: str, date: str, environ: dict[str, str]) -> dict[str, str]:
    """Build all files into `folder`/dist. Returns their SHA-256 digests by name."""
    source, dist = folder / "source", folder / "dist"
    source.mkdir()
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True).stdout
    subprocess.run(["tar", "--extract", "--directory", str(source)], input=archive, check=True)
    log = source / "CHANGELOG.md"
    log.write_text(changelog.cut(log.read_text(encoding="utf-8"), version, date), encoding="utf-8")
    _hatchling(source, dist, environ, "sdist", "wheel")
    for machine in MACHINES:
        if kernels.find_compiler(machine) is None:
            print(f"release: no wheel with kernels for {machine}, because there is no compiler for it")
            continue
        platform = kernels.build(folder / machine, machine)
        own = {"HEADRACE_KERNELS": str(folder / machine), "HEADRACE_WHEEL_PLATFORM": platform}
        _hatchling(source, dist, {**environ, **own}, "wheel")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(dist.iterdir())}


def _hatchling(source: Path, dist: Path, environ: dict[str, str], *targets: str) -> None:
    for target in targets:
        command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(dist)]
        subprocess.run(command, cwd=source, env=environ, check=True, stdout=subprocess.DEVNULL)


def _check(version: str, files: list[str]) -> None:
    tools = Path(sys.executable).parent
    subprocess.run([tools / "twine", "check", "--strict", *(DIST / name for name in files)], check=True)
    packages = components.installed_closure()
    base = DIST / f"headrace-{version}"
    found = components.write_sbom(
        tools / "cyclonedx-py", Path(sys.executable), ROOT, Path(f"{base}.cdx.json"), packages
    )
    unknown = components.write_licences(found, Path(f"{base}.licences.md"))
    print(f"SBOM: {len(found)} components; licences unknown: {', '.join(unknown) or 'none'}")
    print(f"pip-audit: {components.audit(tools / 'pip-audit', packages, Path(f'{base}.audit.json'))}")
    notes = changelog.notes((DIST / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    Path(f"{base}.notes.md").write_text(notes, encoding="utf-8")


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
