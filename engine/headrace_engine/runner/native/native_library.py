"""Compiles the C kernels of this package once on a machine, and loads them with ctypes.

A library is built with the system's C compiler and kept in the user's cache, with a key of source, compiler and
processor. If it cannot be built, a precompiled library of the package is loaded, if there is one. A loaded library has
all rights of this process, so the cache must be writable by this user only.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch  # before any of these libraries, see `_open`

from headrace_engine.runner.native import precompiled
from headrace_engine.runner.native.kernel_source import FLAGS, source_text
from headrace_engine.runner.native.processor import processor_flags
from headrace_engine.system.private_folder import candidates, make_private, read_private

logger = logging.getLogger(__name__)

# The numbers of the types in vectors.h.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}

_FLAGS = [*FLAGS, "-march=native"]
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_LONGEST_BUILD_SECONDS = 300.0
_POLL_SECONDS = 0.1
_TEST_PROGRAM = (
    "#include <linux/futex.h>\n#include <math.h>\n#include <omp.h>\nint f(void) { return omp_get_max_threads(); }\n"
)
_DIGEST_SIZE = hashlib.sha256().digest_size


def load(package: str, source_name: str) -> ctypes.CDLL:
    """Load the library of one C file of a package; build it if needed. Raises OSError that says what is missing."""
    source = source_text(package, source_name)
    compiler = find_compiler()
    try:
        if compiler is None:
            raise CompilerError("no C compiler was found (tried $CC, then cc)")
        return _load_built(source_name, source, compiler)
    except OSError as error:  # no compiler, one that fails, or no place to build in
        library = precompiled.find(source_name, source)
        if library is None:
            raise
        level = logging.INFO if compiler is None else logging.WARNING
        variant = library.parent.name
        logger.log(level, "precompiled kernels of %s loaded: variant=%s reason=%s", source_name, variant, error)
        return _open(library)


def _load_built(source_name: str, source: str, compiler: str) -> ctypes.CDLL:
    """Load a library that this machine's compiler has built, or builds now."""
    name = f"{Path(source_name).stem}-{_identity(source, compiler)}.so"
    places = list(candidates("kernels"))
    refused: dict[Path, OSError] = {}
    to_build: list[Path] = []
    for folder in places:
        try:
            if os.path.lexists(folder / name) and _intact(make_private(folder) / name):
                return _reported(_open(folder / name), folder, places, refused)
        except OSError as error:
            refused[folder] = error
        else:
            to_build.append(folder)
    for folder in to_build:
        try:
            kept = make_private(folder) / name
            with _alone_in(folder):
                if not _intact(kept):  # another process may just have built it
                    with tempfile.TemporaryDirectory(dir=folder) as build_folder:
                        _build(source_name, source, compiler, Path(build_folder) / name).replace(kept)
                    logger.info("built %s into %s", source_name, kept)
            return _reported(_open(kept), folder, places, refused)
        except CompilerError:
            raise
        except OSError as error:
            refused[folder] = error
    logger.warning("compiled kernels cannot be cached, so every start builds them: %s", _reasons(refused))
    with tempfile.TemporaryDirectory() as build_folder:
        return _open(_build(source_name, source, compiler, Path(build_folder) / name))


def find_compiler() -> str | None:
    """Return the path of the C compiler that builds the kernels; None if there is none."""
    return shutil.which(os.environ.get("CC", "cc"))


def check_compiler(compiler: str) -> None:
    """Build a few lines with the kernels' headers and flags. Raises CompilerError, or OSError if the disk is full."""
    with tempfile.TemporaryDirectory() as folder:
        _build("a test program", _TEST_PROGRAM, compiler, Path(folder) / "test.so")


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process builds there.

    The system lifts the lock of a process that dies. Without locks, or if a process that has stopped holds one for too
    long, several processes may build the same.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    deadline = time.monotonic() + _LONGEST_BUILD_SECONDS
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_SECONDS)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)


def _reported(library: ctypes.CDLL, folder: Path, places: list[Path], refused: dict[Path, OSError]) -> ctypes.CDLL:
    if folder != places[0]:
        reasons = _reasons(refused) or f"{places[0]} does not have them"
        logger.warning("compiled kernels are cached in %s instead of %s: %s", folder, places[0], reasons)
    return library


def _reasons(refused: dict[Path, OSError]) -> str:
    return "; ".join(f"{folder}: {error}" for folder, error in refused.items())


def _open(library: Path) -> ctypes.CDLL:
    """Load a library, from memory if its file system is mounted noexec, like /dev/shm in a container."""
    # torch has loaded its own OpenMP runtime before. The kernels bind to the same one, so there is one thread pool, and
    # not two that compete for the cores.
    try:
        return ctypes.CDLL(str(library))
    except OSError:
        copy = os.memfd_create(library.stem)
        try:
            with open(copy, "wb", closefd=False) as memory:
                memory.write(library.read_bytes())
            return ctypes.CDLL(f"/proc/self/fd/{copy}")
        finally:
            os.close(copy)


class CompilerError(OSError):
    """There is no compiler, or it refused the source. Another folder would not help."""


def _identity(source: str, compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = [source, version, " ".join(_FLAGS), platform.machine(), processor_flags(), "digest at the end"]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _intact(library: Path) -> bool:
    """Whether a library exists, belongs to this user, and is complete.

    A truncated library would kill the process that loads it.
    """
    try:
        content = read_private(library)
    except FileNotFoundError:
        return False
    except OSError as error:
        logger.warning("a compiled kernel is rebuilt: %s", error)
        return False
    if hashlib.sha256(content[:-_DIGEST_SIZE]).digest() == content[-_DIGEST_SIZE:]:
        return True
    logger.warning("%s is damaged and rebuilt", library)
    return False


def _build(source_name: str, source: str, compiler: str, target: Path) -> Path:
    """Compile to a new private file. Raises CompilerError, or OSError if the disk is full."""
    done = subprocess.run(
        [compiler, *_FLAGS, "-x", "c", "-", "-o", str(target), "-lm"],
        input=source,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LC_ALL": "C", "TMPDIR": str(target.parent)},  # temporary files on the same disk
    )
    if done.returncode:
        for reason in _NO_ROOM:
            if os.strerror(reason) in done.stderr:
                raise OSError(reason, os.strerror(reason), str(target.parent))
        raise CompilerError(f"{compiler} cannot build {source_name}: {done.stderr.strip()[:500]}")
    # The loader ignores data after the end of a library.
    target.write_bytes((content := target.read_bytes()) + hashlib.sha256(content).digest())
    target.chmod(0o700)
    return target


Layout = dict[str, tuple[int, int]]
"""Field name -> offset and size in bytes."""


class LayoutError(RuntimeError):
    """A ctypes structure has another layout than its C structure: one of the two declarations is out of date."""


class _FieldLayout(ctypes.Structure):
    """`field_layout` of struct_layout.h."""

    _fields_ = (("name", ctypes.c_char_p), ("offset", ctypes.c_int64), ("size", ctypes.c_int64))


def check_layout(library: ctypes.CDLL, c_name: str, structure: type[ctypes.Structure]) -> None:
    """Compare names, offsets and sizes of all fields, and the size of the whole.

    Args:
        library: exports the layout of `c_name` with EXPORT_LAYOUT.

    Raises:
        LayoutError: they differ, or the library does not export the layout.
    """
    expected, expected_size = _layout_in_c(library, c_name)
    name = structure.__name__
    actual = {field[0]: _offset_and_size(structure, field[0]) for field in structure._fields_}
    for field in [*expected, *(field for field in actual if field not in expected)]:
        if field not in actual:
            raise LayoutError(f"{name} lacks the field {field} of the C structure {c_name}")
        if field not in expected:
            raise LayoutError(f"{name} has the field {field}, which the C structure {c_name} lacks")
        if actual[field] != expected[field]:
            raise LayoutError(
                f"{name}.{field} is {actual[field][1]} bytes at offset {actual[field][0]}, "
                f"but {expected[field][1]} bytes at offset {expected[field][0]} in the C structure {c_name}"
            )
    if ctypes.sizeof(structure) != expected_size:
        raise LayoutError(
            f"{name} takes {ctypes.sizeof(structure)} bytes, but the C structure {c_name} takes {expected_size}"
        )


def _layout_in_c(library: ctypes.CDLL, c_name: str) -> tuple[Layout, int]:
    try:
        entry = _FieldLayout.in_dll(library, f"headrace_layout_{c_name}")
    except ValueError as error:
        raise LayoutError(f"the library does not export the layout of {c_name}: {error}") from error
    layout: Layout = {}
    while entry.name is not None:
        layout[entry.name.decode()] = entry.offset, entry.size
        entry = _FieldLayout.from_address(ctypes.addressof(entry) + ctypes.sizeof(_FieldLayout))
    return layout, entry.size


def _offset_and_size(structure: type[ctypes.Structure], field: str) -> tuple[int, int]:
    descriptor = getattr(structure, field)
    return descriptor.offset, descriptor.size
