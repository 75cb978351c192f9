"""`InputFile`: the lines of a batch's input, read as often as wanted, one in memory at a time."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from headrace_gateway.batch_line import MAX_LINE_BYTES
from headrace_workers.errors import BatchError

STANDARD: Final = "-"
"""Standard input or output, where a file is named."""


class InputFile(AbstractContextManager["InputFile"]):
    """Opens the file; `-` is standard input. What cannot be read twice is copied into a temporary file first.

    Raises BatchError where the file cannot be read.
    """

    def __init__(self, name: str) -> None:
        self.name: Final = "standard input" if name == STANDARD else name
        try:
            self._file: Final = _opened(name)
        except OSError as error:
            raise BatchError(f"{self.name} cannot be read: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Every line that is not blank and its number, from 1. Of one that is too long, what shows that it is."""
        self._file.seek(0)
        number = 0
        while line := self._read_line():
            number += 1
            if len(line) > MAX_LINE_BYTES or line.strip():
                yield number, line
            while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                line = self._read_line()

    def _read_line(self) -> bytes:
        try:
            return self._file.readline(MAX_LINE_BYTES + 1)
        except OSError as error:
            raise BatchError(f"{self.name} cannot be read: {error.strerror}") from None


def _opened(name: str) -> IO[bytes]:
    if name == STANDARD:
        return _copied(sys.stdin.buffer)
    file = Path(name).open("rb")  # noqa: SIM115  # the InputFile closes it
    if file.seekable():
        return file
    with file:
        return _copied(file)


def _copied(source: IO[bytes]) -> IO[bytes]:
    copy: Any = tempfile.TemporaryFile()  # noqa: SIM115  # its caller closes it
    shutil.copyfileobj(source, copy)
    return copy
