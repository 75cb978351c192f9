"""`StoredFiles`: files in a directory that all replicas share, one folder for each API key.

    DIR/<owner>/file-<id>         the content
    DIR/<owner>/file-<id>.json    its metadata; without it the file does not exist
    DIR/<owner>/.part-<random>    an upload in progress; the sweep deletes those of killed processes
    DIR/<owner>/batch_<id>/       files of a batch that has not ended
    DIR/redis-id                  the id of the Redis that stores these batches

A file is looked up in the folder of the caller's key, so one key cannot reach the files of another. Names from users
are never used as paths. All methods block: call them in a thread. They raise OSError.
"""

import contextlib
import errno
import hashlib
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
import structlog

from headrace_gateway.keys.api_key import ApiKey

KEPT_SECONDS: Final = 30 * 86_400
"""Default life of a file."""
_STALE_SECONDS: Final = 7200
"""Seconds. An upload that was not written to for this long is abandoned."""
_ID: Final = re.compile(r"file-[0-9a-f]{32}")
_PART: Final = ".part-"
_OWNER: Final = re.compile(r"[0-9a-f]{32}")
_OURS: Final = re.compile(r"file-[0-9a-f]{32}(\.json)?|\.part-[0-9a-f]{32}(\.about)?|batch_[0-9a-f]{32}")
_REDIS_ID: Final = "redis-id"
_LEAST_BYTES: Final = 4096
"""Size that counts for a smaller file: it takes at least one block of the disk."""
_CHUNK_BYTES: Final = 2**20

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)


class StoredFile(msgspec.Struct, frozen=True):
    """The metadata of a file. Times are Unix seconds."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str

    def shape(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        return {**msgspec.structs.asdict(self), "object": "file", "status": "processed", "status_details": None}


class FileLostError(Exception):
    """A part of a file is missing, or shorter than it was written."""


def is_full(error: OSError) -> bool:
    """Return whether the disk or the user's quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def owner_of(name: str, tenant: str | None) -> str:
    """Return the folder name of an API key."""
    return hashlib.blake2b(msgspec.json.encode([name, tenant]), digest_size=16).hexdigest()


class StoredFiles:
    """Files in a directory.

    Args:
        root: created if it does not exist.
        now: returns the time in Unix seconds.
    """

    def __init__(self, root: Path, now: Callable[[], float] = time.time) -> None:
        self._root: Final = root
        self._now: Final = now

    def folder(self, key: ApiKey) -> Path:
        """Return the folder of a key; create it if it does not exist."""
        folder = self._root / owner_of(key.name, key.tenant)
        if is_missing(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            sync_folder(self._root)
        return folder

    def used(self, key: ApiKey) -> tuple[int, int]:
        """Return the bytes and the number of entries in a key's folder: files, uploads and open batches."""
        size = count = 0
        for path in self.folder(key).rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # it was deleted in the meantime
                if path.suffix != ".json" and not path.is_dir():
                    size += max(path.lstat().st_size, _LEAST_BYTES)
                    count += 1
        return size, count

    def begin(self, key: ApiKey) -> "PartialFile":
        """Create a file. It is visible only after its `finish`."""
        return PartialFile(self.folder(key), self._now)

    def assemble(self, key: ApiKey, parts: Sequence[tuple[Path, int]], **about: Any) -> StoredFile:
        """Make a file from the leading bytes of each part. `about` is passed to `PartialFile.finish`.

        Raises FileLostError if a part is missing or shorter.
        """
        partial = self.begin(key)
        try:
            for path, size in parts:
                partial.copy(path, size)
            return partial.finish(**about)
        finally:
            partial.discard()

    def find(self, key: ApiKey, file_id: str) -> tuple[StoredFile, Path] | None:
        """Return the metadata and the path of a file; None if it does not exist or has expired."""
        if not _ID.fullmatch(file_id):
            return None
        path = self._root / owner_of(key.name, key.tenant) / file_id
        file = _read(path.with_suffix(".json"))
        return None if file is None or self._now() >= file.expires_at else (file, path)

    def all(self, key: ApiKey) -> list[StoredFile]:
        """Return the files of a key, oldest first."""
        now = self._now()
        found = [_read(path) for path in self.folder(key).glob("file-*.json")]
        files = [file for file in found if file is not None and now < file.expires_at]
        return sorted(files, key=lambda file: (file.created_at, file.id))

    def delete(self, key: ApiKey, file_id: str) -> bool:
        """Delete a file; return whether it existed."""
        found = self.find(key, file_id)
        if found is None:
            return False
        _remove(found[1])
        return True

    def batch_folder(self, key: ApiKey, batch_id: str) -> Path:
        """Return the folder where a batch stores its input and its answers until it ends."""
        return self._root / owner_of(key.name, key.tenant) / batch_id

    def redis_id(self, new: str | None = None) -> str | None:
        """Return the id of the Redis that stores these batches. If the directory has none, `new` becomes its id."""
        path = self._root / _REDIS_ID
        if new is not None:
            whole = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
            with open(whole, "x", opener=_private) as target:
                target.write(new)
            whole.replace(path)  # atomic, so that a reader never sees half an id
        try:
            return path.read_text()
        except FileNotFoundError:
            return None

    def sweep(self) -> list[Path]:
        """Delete expired files and leftovers of killed processes. Only names that this class writes are touched.

        Returns the folders of batches that have not changed for long. Only Redis knows whether those batches ended.
        """
        found: list[Path] = []
        for folder in _entries(self._root, _OWNER):
            for entry in _entries(Path(folder), _OURS) if folder.is_dir(follow_symlinks=False) else ():
                try:
                    found += [Path(entry)] if self._is_old_folder(entry) else []
                except FileNotFoundError:
                    pass
                except OSError as error:
                    logger.warning("files directory not swept", name=entry.name, reason=error.strerror)
        return found

    def _is_old_folder(self, entry: "os.DirEntry[str]") -> bool:
        """Return whether the entry is an old folder of a batch. Delete the entry if it is an obsolete file."""
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
    """A file that is being written. End it with `finish` or `discard`."""

    def __init__(self, folder: Path, now: Callable[[], float]) -> None:
        self._folder: Final = folder
        self._now: Final = now
        self._path: Final = folder / f"{_PART}{secrets.token_hex(16)}"
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._lock: Final = threading.Lock()  # no thread may write to a descriptor that was closed and reused
        self.size = 0

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        with self._lock:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        self.size += len(data)

    def copy(self, path: Path, size: int) -> None:
        """Append the first `size` bytes of a file. Raises FileLostError if it has fewer."""
        try:
            with path.open("rb") as source:
                while size:
                    data = source.read(min(size, _CHUNK_BYTES))
                    if not data:
                        raise FileLostError(f"{path.name} is shorter than it was written")
                    self.write(data)
                    size -= len(data)
        except FileNotFoundError:
            raise FileLostError(f"{path.name} is missing") from None

    def finish(
        self, *, filename: str, purpose: str, kept_seconds: int = KEPT_SECONDS, file_id: str | None = None
    ) -> StoredFile:
        """Make the file visible. It is flushed to the disk when this returns.

        Args:
            file_id: id of the file, which replaces a file with the same id; None: a new id.
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
        """Delete what was written; do nothing after `finish`."""
        if self._fd >= 0:
            self._close()
            self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        with self._lock:
            os.close(self._fd)
            self._fd = -1


def copy_to_disk(source: Path, target: Path) -> None:
    """Copy a file. The copy is flushed to the disk when this returns."""
    shutil.copyfile(source, target)
    with target.open("rb") as copy:
        os.fsync(copy.fileno())


def is_missing(path: Path) -> bool:
    """Return whether the path certainly does not exist; False if the disk does not answer."""
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _entries(folder: Path, names: "re.Pattern[str]") -> "list[os.DirEntry[str]]":
    """Return the entries of a folder whose names match; none if the folder cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if names.fullmatch(entry.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning("files directory not swept", name=folder.name, reason=error.strerror)
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
