"""Compile the kernels for wheels: `python release/kernels.py FOLDER [--machine aarch64]`.

FOLDER gets a folder for each variant of the architecture. The platform tag of their wheel is printed. It names the
newest version of the C library that a kernel needs.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from headrace_engine.runner.native.kernel_source import FLAGS, source_text
from headrace_engine.runner.native.precompiled import VARIANTS, library_name

ROOT: Final = Path(__file__).parents[1]
SOURCES: Final = sorted((ROOT / "engine" / "headrace_engine" / "runner").glob("*/*.c"))


def find_compiler(machine: str) -> str | None:
    """Return the compiler for an architecture: a cross compiler unless it is this machine's."""
    name = os.environ.get("CC", "cc") if machine == platform.machine() else f"{machine}-linux-gnu-gcc"
    return shutil.which(name)


def build(folder: Path, machine: str) -> str:
    """Compile all variants of an architecture into folders, and return the platform tag of their wheel."""
    compiler = find_compiler(machine)
    if compiler is None:
        sys.exit(f"release: there is no C compiler for {machine}")
    newest = (2, 0)
    for variant in (each for each in VARIANTS if each.machine == machine):
        (folder / variant.name).mkdir(parents=True)
        for path in SOURCES:
            source = source_text(f"headrace_engine.runner.{path.parent.name}", path.name)
            target = folder / variant.name / library_name(path.name, source)
            # without a build id, which differs between linkers; without symbols that only debuggers read
            command = [compiler, *FLAGS, *variant.options.split(), "-s", "-Wl,--build-id=none"]
            subprocess.run([*command, "-x", "c", "-", "-o", str(target), "-lm"], input=source, text=True, check=True)
            newest = max(newest, _newest_c_library(target))
    return f"manylinux_{newest[0]}_{newest[1]}_{machine}"


def _newest_c_library(library: Path) -> tuple[int, int]:
    """Return the newest version of glibc whose symbols a library names."""
    versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())
    return max(((int(major), int(minor)) for major, minor in versions), default=(2, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--machine", default=platform.machine())
    arguments = parser.parse_args()
    print(build(arguments.folder, arguments.machine))


if __name__ == "__main__":
    main()
