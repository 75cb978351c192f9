"""`WatchedFile`: an operator's file that is reloaded when it changes. `read_toml`: reads one version."""

import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import structlog

from headrace_gateway.errors import GatewaySettingsError

_LOOK_SECONDS: Final = 1.0
_MAX_BYTES: Final = 4 * 2**20

Content = TypeVar("Content")

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)


class WatchedFile(Generic[Content]):
    """Reads the file at once. Raises GatewaySettingsError if it cannot be used.

    A later version that cannot be used is logged, and the last valid one stays in effect.

    Args:
        what: the file's name in the log, such as "key file".
        read: returns the content of a version, or raises GatewaySettingsError.
        when_read: called after each read of a new version; its argument says whether the version is valid.
    """

    def __init__(
        self,
        what: str,
        path: Path,
        read: Callable[[Path], Content],
        *,
        now: Callable[[], float] = time.monotonic,
        when_read: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._what: Final = what
        self._path: Final = path
        self._read: Final = read
        self._now: Final = now
        self._when_read: Final = when_read
        self._version = _version(path)
        self._looked_at = now()
        self._content = read(path)
        when_read(True)

    def content(self) -> Content:
        """Return the content of the last valid version. The file is checked at most once a second."""
        if self._now() - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = self._now()
            version = _version(self._path)
            if version != self._version:
                self._version = version
                self._read_again()
        return self._content

    def _read_again(self) -> None:
        try:
            self._content = self._read(self._path)
        except GatewaySettingsError as error:
            logger.error("file refused, last valid version stays in use", file=self._what, reason=str(error))
            self._when_read(False)
        else:
            logger.info("file read", file=self._what)
            self._when_read(True)


def _version(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def read_toml(what: str, path: Path) -> tuple[dict[str, Any], str]:
    """Return the document and its text. Raises GatewaySettingsError, which quotes nothing of the file."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise GatewaySettingsError(f"the {what} {path} cannot be read: {error.strerror}") from None
    if len(raw) > _MAX_BYTES:
        raise GatewaySettingsError(f"the {what} {path} must be at most {_MAX_BYTES} bytes")
    try:
        text = raw.decode()
        return tomllib.loads(text), text
    except UnicodeDecodeError:
        raise GatewaySettingsError(f"the {what} {path} is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise GatewaySettingsError(f"the {what} {path} cannot be used: {error}") from None
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, an invalid date, deep arrays
        message = f"the {what} {path} cannot be used: it is not valid TOML ({type(error).__name__})"
        raise GatewaySettingsError(message) from None
