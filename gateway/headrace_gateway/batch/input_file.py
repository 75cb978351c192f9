"""`InputFile`: reads the lines of a batch's input, any number of times, with a few lines in memory at a time."""

import shutil
import sys
import tempfile
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO, Final, Self

from headrace_gateway.batch.line import MAX_LINE_BYTES
from headrace_gateway.errors import BatchError, InputRefusedError, LineProblem
from headrace_gateway.files.threads import in_file_thread
from headrace_gateway.requests.body import SMALL_BYTES
from headrace_wire.codes import BatchCode

STANDARD: Final = "-"
"""Stands for standard input or standard output in place of a file name."""
_BLOCK_LINES: Final = 32
_BLOCK_BLANKS: Final = 1024
_BLOCK_BYTES: Final = SMALL_BYTES
"""Limits of a block of lines. The event loop handles a whole block before other tasks get a turn."""


class InputFile:
    """Opens the file; `-` is standard input. Input that cannot be read twice is first copied to a temporary file.

    Raises BatchError if the file cannot be read.
    """

    def __init__(self, name: str) -> None:
        self.name: Final = "standard input" if name == STANDARD else name
        try:
            self._file: Final = _opened(name)
        except OSError as error:
            raise BatchError(f"{self.name} cannot be read: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield every line that is not blank, with its number from 1. An oversized line is cut just above the limit."""
        return ((number, line) for number, line in self._all_lines() if not _is_blank(line))

    def _all_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield these lines and the blank ones too. A byte order mark at the start is not part of the first line."""
        self._file.seek(0)
        if self._file.read(len(BOM_UTF8)) != BOM_UTF8:
            self._file.seek(0)
        number = 0
        while line := self._read_line():
            number += 1
            yield number, line
            while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                line = self._read_line()

    async def read(self, *, max_lines: int | None = None) -> AsyncIterator[tuple[int, bytes]]:
        """Yield what `lines` yields without blocking the event loop: a thread reads a few lines at a time.

        Raises InputRefusedError if the file has more than `max_lines` lines, blank ones included.
        """
        lines = self._all_lines()
        while block := await in_file_thread(_block, lines):
            for number, line in block:
                if max_lines is not None and number > max_lines:
                    message = f"it has more than {max_lines} lines: split it into several batches"
                    raise InputRefusedError(self.name, [LineProblem(None, BatchCode.TOO_MANY_TASKS, message)], 1)
                if line:
                    yield number, line

    def _read_line(self) -> bytes:
        try:
            return self._file.readline(MAX_LINE_BYTES + 1)
        except OSError as error:
            raise BatchError(f"{self.name} cannot be read: {error.strerror}") from None


def _is_blank(line: bytes) -> bool:
    """Return whether a line is blank. An oversized line counts as not blank: it was cut, so its end is unknown."""
    return len(line) <= MAX_LINE_BYTES and not line.strip()


def _block(lines: Iterator[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Return the next lines, with b"" for blank ones. The block is small, so that other readers do not wait long."""
    block: list[tuple[int, bytes]] = []
    num_bytes = num_filled = 0
    for number, line in lines:
        is_blank = _is_blank(line)
        block.append((number, b"" if is_blank else line))
        num_filled += not is_blank
        num_bytes += len(line)
        if num_filled == _BLOCK_LINES or len(block) == _BLOCK_BLANKS or num_bytes >= _BLOCK_BYTES:
            break
    return block


def _opened(name: str) -> IO[bytes]:
    if name == STANDARD:
        return _copied(sys.stdin.buffer)
    file = Path(name).open("rb")  # noqa: SIM115  # InputFile closes it
    if file.seekable():
        return file
    with file:
        return _copied(file)


def _copied(source: IO[bytes]) -> IO[bytes]:
    copy: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    shutil.copyfileobj(source, copy)
    return copy
