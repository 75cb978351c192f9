"""Runs the child process of an engine with another Python interpreter.

Headrace need not be installed for that interpreter. The PYTHONPATH of the child begins with a private folder of links
to the packages of this process, so that both sides of the frames have the same version.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from headrace_engine.errors import ConfigError
from headrace_engine.system.private_folder import first_private

logger = logging.getLogger(__name__)

_OLDEST_PYTHON: Final = (3, 11)
_PROBE_SECONDS: Final = 30.0
_PROBE_BYTES: Final = 4096
"""More bytes than the probe prints."""
_PROBE: Final = """
import importlib.util, json, sys
found = importlib.util.find_spec("msgpack") is not None
print(json.dumps([sys.version_info[:2], sys.implementation.cache_tag, found]))
"""


def is_other(python: str | None) -> bool:
    """Whether this is not the interpreter of this process. Each virtual environment is an interpreter of its own."""
    return python is not None and _program(python) != sys.executable


@lru_cache
def check(python: str) -> bool:
    """Run another interpreter once. Return whether it should import the msgpack of this process.

    It should not if it has its own msgpack and this one is compiled for another version of Python: this one would be
    slow there.

    Raises:
        ConfigError: the program cannot be run, is not Python, or is too old.
    """
    try:
        version, cache_tag, has_msgpack = json.loads(_output([_program(python), "-c", _PROBE]))
    except OSError as error:
        raise ConfigError(f"engine_python {python!r} cannot be run: {error.strerror}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"engine_python must be a Python interpreter, got {python!r}") from error
    if tuple(version) < _OLDEST_PYTHON:
        needed = ".".join(map(str, _OLDEST_PYTHON))
        raise ConfigError(
            f"engine_python must be at least Python {needed}, got {python!r}, Python {version[0]}.{version[1]}"
        )
    return cache_tag == sys.implementation.cache_tag or not has_msgpack


def _output(command: list[str]) -> bytes:
    """Return the output of a command, or nothing if it fails or takes too long.

    The command may be any program, even one that never ends or never stops printing.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
    )
    assert process.stdout is not None
    end = threading.Timer(_PROBE_SECONDS, _kill_group, [process.pid])
    end.start()
    try:
        printed = process.stdout.read(_PROBE_BYTES)
        if len(printed) == _PROBE_BYTES:
            _kill_group(process.pid)
        return b"" if process.wait() else printed
    finally:
        end.cancel()
        process.stdout.close()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the group has ended
        os.killpg(pid, signal.SIGKILL)


class LinkedPackages:
    """A private folder of symbolic links to packages of this process. It is removed with this object or process.

    A lock shows that this process lives. A process that creates such a folder also removes those of killed processes.

    Raises:
        OSError: the folder cannot be created or locked.
    """

    def __init__(self, names: Iterable[str]) -> None:
        root = first_private("engine-parts", logger.warning)
        with _locked(root):  # otherwise another process could take a new folder for an abandoned one
            for folder in root.iterdir():
                _remove_if_left(folder)
            self.folder = Path(tempfile.mkdtemp(dir=root))
            lock = os.open(self.folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._finalizer = weakref.finalize(self, _remove, self.folder, lock, os.getpid())
        for path in filter(None, map(_path, names)):
            (self.folder / path.name).symlink_to(path)

    def remove(self) -> None:
        self._finalizer()


def _program(python: str) -> str:
    return shutil.which(python) or python


def _path(name: str) -> Path | None:
    """Return the folder of a package or the file of a module, or None if this process does not have it."""
    spec = find_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).absolute()
    return Path(spec.origin).absolute() if spec.origin is not None else None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_if_left(folder: Path) -> None:
    with contextlib.suppress(OSError):  # the owner of the folder still runs, or removes it now
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(descriptor)


def _remove(folder: Path, lock: int, pid: int) -> None:
    if os.getpid() != pid:
        return  # this process is a fork, and does not own the folder
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
