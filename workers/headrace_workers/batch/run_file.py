"""`RunFile`: the secret from which the request ids of a run are derived.

The next run after a kill derives the same ids, and finds its requests in the queue by them; other clients cannot guess
them. The file lies beside the output, and is deleted when every line has an answer.
"""

import os
import re
import secrets
from pathlib import Path
from typing import Final

from headrace_gateway.errors import BatchError

_SECRET: Final = re.compile(r"[0-9a-f]{32}\n")


class RunFile:
    """The constructor reads the file if it exists, and `begin` creates it. Both raise BatchError.

    Args:
        path: None for a run that cannot be resumed.
    """

    def __init__(self, path: Path | None) -> None:
        self._path: Final = path
        self.is_new = True
        """Whether there is no unfinished run to resume."""
        self.secret = secrets.token_hex(16)
        if path is None:
            return
        try:
            text = path.read_text(encoding="ascii", errors="replace") if path.exists() else ""
        except OSError as error:
            raise BatchError(f"{path} cannot be read: {error.strerror}") from None
        if not text:  # nothing was sent with an empty file: the secret is written first
            return
        if not _SECRET.fullmatch(text):
            raise BatchError(f"{path} is not a run file: delete it, or name another output")
        self.secret, self.is_new = text.strip(), False

    def begin(self) -> None:
        """Write the secret, for the next run; call it before anything is sent."""
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
        """Delete the file; call it when the run is complete."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
