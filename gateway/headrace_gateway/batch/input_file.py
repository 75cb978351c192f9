"""`InputFile`: the lines of a batch's input, read again as often as needed, a few in memory at a time."""

import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO, Final, Self

from headrace_gateway.batch_line import MAX_LINE_BYTES
from headrace_gateway.errors import BatchError
from headrace_gateway.files.file_threads import in_file_thread

STANDARD: Final = "-"
"""Stands for standard input or standard output in place of a file name."""
_BLOCK_LINES: Final = 32
_BLOCK_BYTES: Final = 2**20


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
        self._file.seek(0)
        number = 0
        while line := self._read_line():
            number += 1
            if len(line) > MAX_LINE_BYTES or line.strip():
                yield number, line
            while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                line = self._read_line()

    async def read(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the same lines without blocking the event loop: a thread reads a few at a time."""
        lines = self.lines()
        while block := await in_file_thread(_block, lines):
            for line in block:
                yield line

    def _read_line(self) -> bytes:
        try:
            return self._file.readline(MAX_LINE_BYTES + 1)
        except OSError as error:
            raise BatchError(f"{self.name} cannot be read: {error.strerror}") from None


def _block(lines: Iterator[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    block, size = [], 0
    for line in lines:
        block.append(line)
        size += len(line[1])
        if len(block) == _BLOCK_LINES or size >= _BLOCK_BYTES:
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
