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

# The kernels' numbers for the types that they take, as in vectors.h and elementwise.c.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}

_FLAGS = ["-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC"]


def load(package: str, source_name: str) -> ctypes.CDLL:
    """The library made from one C file of a package. Raises OSError, whose message says what is missing."""
    source = source_text(package, source_name)
    library = _build(source_name, source)
    # torch brings its own OpenMP runtime into the process before this; the kernel binds to the same one, so there is
    # one thread pool and not two that fight for the cores.
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:  # a crash or a full disk may have damaged the file: it must not cost speed for ever
        logger.warning("%s is built anew: %s", library.name, error)
        library.unlink(missing_ok=True)
        return ctypes.CDLL(str(_build(source_name, source)))


def source_text(package: str, source_name: str) -> str:
    """A C file with our own headers in it: one text to build, and to know the library by."""
    folder = files(package)
    return re.sub(
        r'^#include "(.+)"$',
        lambda found: folder.joinpath(found[1]).read_text(),
        folder.joinpath(source_name).read_text(),
        flags=re.MULTILINE,
    )


def _build(source_name: str, source: str) -> Path:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise OSError("no C compiler was found (tried $CC, then cc)")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    identity = "\n".join([source, version, " ".join(_FLAGS), platform.machine(), _processor_flags()])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "kernels"
    target = cache / f"{Path(source_name).stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        built = Path(folder) / target.name
        done = subprocess.run(
            [compiler, *_FLAGS, "-x", "c", "-", "-o", str(built), "-lm"],
            input=source,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise OSError(f"{compiler} cannot build {source_name}: {done.stderr.strip()[:500]}")
        built.replace(target)  # atomic: a second process building at the same time loses nothing
    logger.info("built %s into %s", source_name, target)
    return target


def _processor_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
