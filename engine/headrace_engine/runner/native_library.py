"""Compiled kernels: C sources of this package, built once a machine and loaded through ctypes.

A library is built with the C compiler at hand and kept in the user's cache, keyed by source, compiler and processor.
"""

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path

import torch  # before any library of ours, see `load`

logger = logging.getLogger(__name__)

# The kernels' numbers for the types that they take, as in vectors.h.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}

_FLAGS = ["-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC"]
_FLAGS += ["-D_GNU_SOURCE"]  # for the C library's functions that only Linux has
_DIGEST_SIZE = hashlib.sha256().digest_size


def load(package: str, source_name: str) -> ctypes.CDLL:
    """The library made from one C file of a package. Raises OSError, whose message says what is missing."""
    source = source_text(package, source_name)
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise OSError("no C compiler was found (tried $CC, then cc)")
    kept = _cache() / f"{Path(source_name).stem}-{_identity(source, compiler)}.so"
    # torch brings its own OpenMP runtime into the process before this; the kernel binds to the same one, so there is
    # one thread pool and not two that fight for the cores.
    if _intact(kept):
        return ctypes.CDLL(str(kept))
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        room = tempfile.TemporaryDirectory(dir=kept.parent)
    except OSError as error:
        logger.warning("compiled kernels cannot be kept, so every start builds them: %s", error)
        with tempfile.TemporaryDirectory() as folder:
            return ctypes.CDLL(str(_build(source_name, source, compiler, Path(folder) / kept.name)))
    with room as folder:
        _build(source_name, source, compiler, Path(folder) / kept.name).replace(kept)
    logger.info("built %s into %s", source_name, kept)
    return ctypes.CDLL(str(kept))


def source_text(package: str, source_name: str) -> str:
    """A C file with our own headers in it: one text to build, and to know the library by."""
    folder = files(package)
    return re.sub(
        r'^#include "(.+)"$',
        lambda found: folder.joinpath(found[1]).read_text(),
        folder.joinpath(source_name).read_text(),
        flags=re.MULTILINE,
    )


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "kernels"


def _identity(source: str, compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = [source, version, " ".join(_FLAGS), platform.machine(), _processor_flags(), "digest at the end"]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _intact(library: Path) -> bool:
    """Whether it is there and whole: the process that loads what a crash cut short ends by a signal."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    if hashlib.sha256(content[:-_DIGEST_SIZE]).digest() == content[-_DIGEST_SIZE:]:
        return True
    logger.warning("%s is damaged and built anew", library)
    return False


def _build(source_name: str, source: str, compiler: str, target: Path) -> Path:
    """Compile into a file that nobody else knows yet. Raises OSError."""
    done = subprocess.run(
        [compiler, *_FLAGS, "-x", "c", "-", "-o", str(target), "-lm"],
        input=source,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise OSError(f"{compiler} cannot build {source_name}: {done.stderr.strip()[:500]}")
    # Behind a library's end the loader does not look.
    target.write_bytes((content := target.read_bytes()) + hashlib.sha256(content).digest())
    return target


def _processor_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
