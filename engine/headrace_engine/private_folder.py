"""Folders of this user alone, for files that are run or believed: compiled kernels, converted weights.

Nobody else may be able to put a file there: neither as the owner of a folder on the way to it, nor through a permission
or by a symbolic link.
"""

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

_LINKS_FOLLOWED = 40  # as many as the kernel follows
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this user's cached files belong: `headrace` under `XDG_CACHE_HOME`, or else under `~/.cache`.

    Raises RuntimeError where this user has no home.
    """
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


def candidates(name: str, environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Where a folder of this name may be, the best place first; none of them need exist or be private."""
    with contextlib.suppress(RuntimeError):  # a user without a home, whom the password database does not know
        yield cache_folder(environ) / name
    if environ.get("XDG_RUNTIME_DIR"):
        yield Path(environ["XDG_RUNTIME_DIR"]) / "headrace" / name
    for place in dict.fromkeys((environ.get("TMPDIR") or tempfile.gettempdir(), "/var/tmp", "/dev/shm")):  # noqa: S108
        yield Path(place) / f"headrace-{os.geteuid()}" / name


def first_private(name: str, report: Callable[[str], None], environ: Mapping[str, str] = os.environ) -> Path:
    """The first of the `candidates` that is, or can be made, private; `report` is told of those that cannot.

    Raises OSError where none can.
    """
    refused = []
    for folder in candidates(name, environ):
        try:
            chosen = make_private(folder)
        except OSError as error:
            refused.append(f"{folder}: {error}")
            continue
        if refused:
            report(f"{folder} is used, as no other folder is private: {'; '.join(refused)}")
        return chosen
    raise PermissionError(f"there is no private folder for {name}: {'; '.join(refused)}")


def make_private(folder: Path) -> Path:
    """Make the folder, with mode 0700, where it is missing, and return it.

    Raises PermissionError where another user than this one and root could change what lies in it, OSError where it
    cannot be made.
    """
    folder = folder.absolute()
    missing = [folder]
    while not os.path.lexists(missing[-1].parent):
        missing.append(missing[-1].parent)
    # before anything is made there: another user could watch, and be quicker
    check_private(missing[-1].parent)
    for path in reversed(missing):
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue  # there already, or another process of this user was quicker
    check_private(folder, alone=True)
    return folder


def check_private(folder: Path, *, alone: bool = False) -> None:
    """Raise PermissionError where another user than this one and root could replace something on the way.

    A parent in which everybody may write will do if it has the sticky bit, as /tmp has: only its owner may then replace
    an entry. With `alone`, the folder itself needs more: nobody else may write in it at all.
    """
    at, left = Path("/"), list(folder.absolute().parts[1:])
    links = 0
    _check_owner(at, os.lstat(at))
    while left:
        part = left.pop(0)
        if part == "..":
            at = at.parent
            continue
        path = at / part
        status = os.lstat(path)
        _check_owner(path, status)
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _LINKS_FOLLOWED:
                raise PermissionError(f"{folder} has more than {_LINKS_FOLLOWED} symbolic links on its way")
            target = path.readlink()
            left = [*(target.parts[1:] if target.is_absolute() else target.parts), *left]
            at = Path("/") if target.is_absolute() else at
            continue
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(f"{path} is not a folder")
        at = path
        if status.st_mode & _OTHERS_WRITE and not (status.st_mode & stat.S_ISVTX and (left or not alone)):
            raise PermissionError(f"others than its owner may write in {path} (mode {stat.S_IMODE(status.st_mode):o})")


def read_private(file: Path) -> bytes:
    """The content of a file. Raises PermissionError where another user than this one and root could have written it."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as opened:  # noqa: PTH123
        status = os.fstat(descriptor)
        _check_owner(file, status)
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{file} is not a plain file")
        if status.st_mode & _OTHERS_WRITE:
            raise PermissionError(f"others than its owner may write to {file} (mode {stat.S_IMODE(status.st_mode):o})")
        return opened.read()


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path} belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}")
