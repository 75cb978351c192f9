"""`RunFile`: the secret that the ids of a run's requests are made from.

A run that was killed finds its requests in the queue by their ids, and nobody else can guess them. The file stands
beside the output and is deleted when every line has its answer.
"""

import os
import re
import secrets
from pathlib import Path
from typing import Final

from headrace_gateway.errors import BatchError

_SECRET: Final = re.compile(r"[0-9a-f]{32}\n")


class RunFile:
    """Reads the file, where it exists; `begin` makes it. Both raise BatchError.

    Args:
        path: None for a run that cannot be gone on with.
    """

    def __init__(self, path: Path | None) -> None:
        self._path: Final = path
        self.is_new = True
        """No run was begun before, or it was complete."""
        self.secret = secrets.token_hex(16)
        if path is None:
            return
        try:
            text = path.read_text(encoding="ascii", errors="replace") if path.exists() else ""
        except OSError as error:
            raise BatchError(f"{path} cannot be read: {error.strerror}") from None
        if not text:  # an empty one was never used: it is written before anything is sent
            return
        if not _SECRET.fullmatch(text):
            raise BatchError(f"{path} is not the file of a run: delete it, or name another output")
        self.secret, self.is_new = text.strip(), False

    def begin(self) -> None:
        """Keep the secret for the next run. Done before anything is sent."""
        if self._path is None or not self.is_new:
            return
        try:
            self._path.touch(mode=0o600)
            with self._path.open("w", encoding="ascii") as file:
                file.write(f"{self.secret}\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise BatchError(f"{self._path} cannot be written: {error.strerror}") from None

    def delete(self) -> None:
        """The run is complete."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
