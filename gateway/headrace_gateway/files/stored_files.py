"""`StoredFiles`: files in a directory that all replicas share, one folder for each API key.

    DIR/<owner>/file-<id>         the content
    DIR/<owner>/file-<id>.json    what is known of it; without this the file does not exist
    DIR/<owner>/.part-<random>    being written; what a killed process leaves is swept
    DIR/<owner>/batch_<id>/       of a batch that has not ended
    DIR/redis-id                  of the Redis that has these batches

A file is found in the folder of the key that asks, so no key reaches another's. Names that users give are never paths.
All methods block: call them in a thread. They raise OSError.
"""

import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace_gateway.keys import ApiKey

KEPT_SECONDS: Final = 30 * 86_400
"""Life of a file whose user names none."""
_STALE_SECONDS: Final = 7200
"""A part that has not been written to for so long belongs to no live upload."""
_ID: Final = re.compile(r"file-[0-9a-f]{32}")
_PART: Final = ".part-"
_OWNER: Final = re.compile(r"[0-9a-f]{32}")
_OURS: Final = re.compile(r"file-[0-9a-f]{32}(\.json)?|\.part-[0-9a-f]{32}(\.about)?|batch_[0-9a-f]{32}")
_REDIS_ID: Final = "redis-id"
_LEAST_BYTES: Final = 4096
"""A file takes at least a block of the disk."""
_CHUNK_BYTES: Final = 2**20

logger = logging.getLogger(__name__)


class StoredFile(msgspec.Struct, frozen=True):
    """What is known of a file. Times are Unix seconds."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str

    def shape(self) -> dict[str, Any]:
        """OpenAI's object."""
        return {**msgspec.structs.asdict(self), "object": "file", "status": "processed", "status_details": None}


class FileLostError(Exception):
    """A part of a file is not there, or shorter than it was written."""


def is_full(error: OSError) -> bool:
    """Whether the disk, or what its user may have of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def owner_of(name: str, tenant: str | None) -> str:
    """The folder of an API key."""
    return hashlib.blake2b(msgspec.json.encode([name, tenant]), digest_size=16).hexdigest()


class StoredFiles:
    """Args:
    root: made where it does not exist.
    now: Unix seconds.
    """

    def __init__(self, root: Path, now: Callable[[], float] = time.time) -> None:
        self._root: Final = root
        self._now: Final = now

    def folder(self, key: ApiKey) -> Path:
        """The folder of a key, made where it does not exist."""
        folder = self._root / owner_of(key.name, key.tenant)
        if is_missing(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            sync_folder(self._root)
        return folder

    def used(self, key: ApiKey) -> tuple[int, int]:
        """Bytes and number of what is in the folder of a key: files, uploads and batches that have not ended."""
        size = count = 0
        for path in self.folder(key).rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # it was deleted meanwhile
                if path.suffix != ".json" and not path.is_dir():
                    size += max(path.lstat().st_size, _LEAST_BYTES)
                    count += 1
        return size, count

    def begin(self, key: ApiKey) -> "PartialFile":
        """Begin a file; nobody sees it before its `finish`."""
        return PartialFile(self.folder(key), self._now)

    def assemble(self, key: ApiKey, parts: Sequence[tuple[Path, int]], **about: Any) -> StoredFile:
        """Make a file of the first bytes of each part. `about` goes to `PartialFile.finish`.

        Raises FileLostError where a part is not there, or shorter.
        """
        partial = self.begin(key)
        try:
            for path, size in parts:
                partial.copy(path, size)
            return partial.finish(**about)
        finally:
            partial.discard()

    def find(self, key: ApiKey, file_id: str) -> tuple[StoredFile, Path] | None:
        """What is known of a file, and its content; None where there is none, or it has expired."""
        if not _ID.fullmatch(file_id):
            return None
        path = self._root / owner_of(key.name, key.tenant) / file_id
        file = _read(path.with_suffix(".json"))
        return None if file is None or self._now() >= file.expires_at else (file, path)

    def all(self, key: ApiKey) -> list[StoredFile]:
        """The files of a key, the oldest first."""
        now = self._now()
        found = [_read(path) for path in self.folder(key).glob("file-*.json")]
        files = [file for file in found if file is not None and now < file.expires_at]
        return sorted(files, key=lambda file: (file.created_at, file.id))

    def delete(self, key: ApiKey, file_id: str) -> bool:
        """Whether it was there."""
        found = self.find(key, file_id)
        if found is None:
            return False
        _remove(found[1])
        return True

    def batch_folder(self, key: ApiKey, batch_id: str) -> Path:
        """Where a batch keeps its input and what it has written, until it has ended."""
        return self._root / owner_of(key.name, key.tenant) / batch_id

    def redis_id(self, new: str | None = None) -> str | None:
        """The id of the Redis whose batches are in the directory. `new` is kept where there is none, if given."""
        path = self._root / _REDIS_ID
        if new is not None:
            whole = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
            with open(whole, "x", opener=_private) as target:
                target.write(new)
            whole.replace(path)  # never half of an id, whenever this process dies
        try:
            return path.read_text()
        except FileNotFoundError:
            return None

    def sweep(self) -> list[Path]:
        """Delete what has expired, and what killed processes have left; nothing that has another's name.

        Returns the folders of batches that have not changed for long; only Redis knows whether these have ended.
        """
        found: list[Path] = []
        for folder in _entries(self._root, _OWNER):
            for entry in _entries(Path(folder), _OURS) if folder.is_dir(follow_symlinks=False) else ():
                try:
                    found += [Path(entry)] if self._is_old_folder(entry) else []
                except FileNotFoundError:
                    pass
                except OSError as error:
                    logger.warning("the directory of files could not be swept: %s: %s", entry.name, error.strerror)
        return found

    def _is_old_folder(self, entry: "os.DirEntry[str]") -> bool:
        """Whether it is a batch's that has not changed for long; a file is deleted where nobody will want it."""
        path, now = Path(entry), self._now()
        is_stale = now - entry.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS
        if entry.is_dir(follow_symlinks=False):
            return is_stale and entry.name.startswith("batch_")
        if path.suffix == ".json":
            file = _read(path)
            if file is not None and now >= file.expires_at:
                _remove(path.with_suffix(""))
        elif is_stale and not path.with_suffix(".json").exists():
            path.unlink()
        return False


class PartialFile:
    """A file that is being written; `finish` or `discard` it."""

    def __init__(self, folder: Path, now: Callable[[], float]) -> None:
        self._folder: Final = folder
        self._now: Final = now
        self._path: Final = folder / f"{_PART}{secrets.token_hex(16)}"
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._lock: Final = threading.Lock()  # a descriptor must not be closed, and used anew, under a thread's write
        self.size = 0

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        with self._lock:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        self.size += len(data)

    def copy(self, path: Path, size: int) -> None:
        """Append the first `size` bytes of a file. Raises FileLostError where it has fewer."""
        try:
            with path.open("rb") as source:
                while size:
                    data = source.read(min(size, _CHUNK_BYTES))
                    if not data:
                        raise FileLostError(f"{path.name} is shorter than it was written")
                    self.write(data)
                    size -= len(data)
        except FileNotFoundError:
            raise FileLostError(f"{path.name} is not there") from None

    def finish(
        self, *, filename: str, purpose: str, kept_seconds: int = KEPT_SECONDS, file_id: str | None = None
    ) -> StoredFile:
        """Make it a file, which is on the disk when this returns.

        Args:
            file_id: None: a new one. A file of the same id is replaced.
        """
        file_id = f"file-{secrets.token_hex(16)}" if file_id is None else file_id
        created = int(self._now())
        file = StoredFile(file_id, self.size, created, created + kept_seconds, filename, purpose)
        os.fsync(self._fd)
        about = self._path.with_name(f"{self._path.name}.about")
        try:
            with open(about, "xb", opener=_private) as target:
                target.write(msgspec.json.encode(file))
                target.flush()
                os.fsync(target.fileno())
            self._path.rename(self._folder / file_id)
            about.rename(self._folder / f"{file_id}.json")
        except OSError:
            about.unlink(missing_ok=True)
            raise
        sync_folder(self._folder)
        self._close()
        return file

    def discard(self) -> None:
        """Leave nothing behind; does nothing after `finish`."""
        if self._fd >= 0:
            self._close()
            self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        with self._lock:
            os.close(self._fd)
            self._fd = -1


def copy_to_disk(source: Path, target: Path) -> None:
    """Copy a file; the copy is on the disk when this returns."""
    shutil.copyfile(source, target)
    with target.open("rb") as copy:
        os.fsync(copy.fileno())


def is_missing(path: Path) -> bool:
    """Whether the disk says that there is no such path; False where it says nothing."""
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _entries(folder: Path, names: "re.Pattern[str]") -> "list[os.DirEntry[str]]":
    """What a folder has of such names; nothing where it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if names.fullmatch(entry.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning("the directory of files could not be swept: %s: %s", folder.name, error.strerror)
        return []


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _read(path: Path) -> StoredFile | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=StoredFile)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _remove(path: Path) -> None:
    path.with_suffix(".json").unlink(missing_ok=True)
    path.unlink(missing_ok=True)
