"""Private folders for files that are executed or trusted: compiled kernels, converted weights.

No other user may be able to place a file there: not as the owner of a parent folder, not by permissions, and not by a
symbolic link.
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
    """Return the cache folder of this user: `headrace` in `XDG_CACHE_HOME`, or in `~/.cache`.

    Raises:
        RuntimeError: this user has no home folder.
    """
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


def candidates(name: str, environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Yield the possible paths of a folder, the preferred one first. They need not exist or be private."""
    with contextlib.suppress(RuntimeError):  # the user has no home and is not in the password database
        yield cache_folder(environ) / name
    if environ.get("XDG_RUNTIME_DIR"):
        yield Path(environ["XDG_RUNTIME_DIR"]) / "headrace" / name
    for place in dict.fromkeys((environ.get("TMPDIR") or tempfile.gettempdir(), "/var/tmp", "/dev/shm")):  # noqa: S108
        yield Path(place) / f"headrace-{os.geteuid()}" / name


def first_private(name: str, report: Callable[[str], None], environ: Mapping[str, str] = os.environ) -> Path:
    """Return the first of the `candidates` that is private or can be created as private. Report the ones before it.

    Raises:
        OSError: none of them can be used.
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
    """Create a folder with mode 0700 if it does not exist, and return it.

    Raises:
        PermissionError: a user other than this one and root could change its content.
        OSError: the folder cannot be created.
    """
    folder = folder.absolute()
    missing = [folder]
    while not os.path.lexists(missing[-1].parent):
        missing.append(missing[-1].parent)
    # checked before anything is created in it: otherwise another user could create it first
    check_private(missing[-1].parent)
    for path in reversed(missing):
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue  # it existed, or another process of this user has created it
    check_private(folder, alone=True)
    return folder


def check_private(folder: Path, *, alone: bool = False) -> None:
    """Raise PermissionError if a user other than this one and root could replace a part of the path.

    A parent may be writable by everyone if it has the sticky bit, like /tmp: then only the owner can replace an entry.
    With `alone`, no other user may write in the folder itself.
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
    """Return the content of a file. Raises PermissionError if another user, except root, could have written it."""
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
