"""`AnswerFile`: a file of a batch's answers that holds complete lines only."""

import fcntl
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from headrace_gateway.batch.input_file import STANDARD
from headrace_gateway.errors import BatchError

_SYNC_SECONDS: Final = 1.0


class Answered(msgspec.Struct):
    """The fields of an answer line that identify its request."""

    custom_id: str
    id: str


_DECODER: Final = msgspec.json.Decoder(Answered)


class AnswerFile:
    """The first write or `open` creates the file. It belongs to one run at a time. Call `close` at the end.

    All methods raise BatchError with a message for the user. A file that is not regular, such as a pipe or standard
    output (`-`), is only written, never read.
    """

    def __init__(self, name: str, now: Callable[[], float] = time.monotonic, *, mode: int = 0o666) -> None:
        self.name: Final = "standard output" if name == STANDARD else name
        self._path: Final = None if name == STANDARD else Path(name)
        self._now: Final = now
        self._mode: Final = mode
        self._fd: int | None = None
        self._is_regular = False
        self._size = 0
        self._synced_at = now()

    @property
    def is_regular(self) -> bool:
        """Whether the file is open and its lines can be read."""
        return self._is_regular

    def exists(self) -> bool:
        return self._path is not None and self._path.exists()

    def is_same_as(self, other: "AnswerFile") -> bool:
        """Return whether both are the same file. Both must exist."""
        return self._path is not None and other._path is not None and self._path.samefile(other._path)

    def open(self) -> None:
        """Open the file for this run alone; create it if it does not exist."""
        if self._fd is not None:
            return
        try:
            if self._path is None:
                sys.stdout.flush()
                self._fd = os.dup(sys.stdout.fileno())
                return
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, self._mode)
            self._is_regular = stat.S_ISREG(os.fstat(self._fd).st_mode)
            if self._is_regular:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._size = os.fstat(self._fd).st_size
        except BlockingIOError:
            raise BatchError(f"another run writes {self.name}: wait for it, or name another file") from None
        except OSError as error:
            raise self._not_written(error) from None

    def answered(self, *, is_ours: bool) -> Iterator[Answered]:
        """Yield the answers in the file. An incomplete last line is cut off.

        Args:
            is_ours: whether a run created this file. If not, an incomplete last line raises BatchError.
        """
        if not self._is_regular or self._path is None:
            return
        whole = 0
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    self._cut(whole, number, is_ours=is_ours)
                    return
                whole += len(line)
                try:
                    yield _DECODER.decode(line)
                except msgspec.DecodeError:
                    message = f"line {number} of {self.name} is not an answer of a batch: name another file"
                    raise BatchError(message) from None

    def _cut(self, whole: int, number: int, *, is_ours: bool) -> None:
        if not is_ours:
            message = f"line {number} of {self.name} does not end with a line feed, and no run of a batch wrote it"
            raise BatchError(f"{message}: name another file, or delete that line")
        assert self._fd is not None
        os.ftruncate(self._fd, whole)
        self._size = whole

    def append(self, line: bytes) -> None:
        """Write a whole line or nothing. Flush the file to the disk if the last flush was over a second ago."""
        self.open()
        assert self._fd is not None
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            if self._is_regular:
                os.ftruncate(self._fd, self._size)
            raise self._not_written(error) from None
        self._size += len(line)
        if self._now() - self._synced_at >= _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Flush all lines to the disk."""
        if self._fd is None or not self._is_regular:
            return
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._not_written(error) from None
        self._synced_at = self._now()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _not_written(self, error: OSError) -> BatchError:
        return BatchError(f"{self.name} cannot be written: {error.strerror}")
