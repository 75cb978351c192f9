"""`KeyFile`: the API keys of a gateway, read again when the file changes.

    [[keys]]
    name = "website"
    sha256 = "5c7d..."          # an array of several while a key is replaced
    tenant = "acme"
    best_priority = 3
    models = ["tiny"]
    requests_per_minute = 600
    tokens_per_minute = 100000
    admin = false

Only `name` and `sha256` are required. The file holds hashes alone. Keys are random and long, so a fast hash is enough.
"""

import hashlib
import hmac
import logging
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec

from headrace_broker.messages import name_problems
from headrace_gateway.errors import GatewaySettingsError
from headrace_gateway.keys import ApiKey

_LOOK_SECONDS: Final = 1.0
_MAX_BYTES: Final = 4 * 2**20
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")

_Positive = Annotated[int, msgspec.Meta(ge=1, le=10**12)]

logger = logging.getLogger(__name__)


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    sha256: str | tuple[str, ...]
    tenant: str | None = None
    best_priority: Annotated[int, msgspec.Meta(ge=0, le=9)] = 0
    models: tuple[str, ...] | None = None
    requests_per_minute: _Positive | None = None
    tokens_per_minute: _Positive | None = None
    admin: bool = False

    @property
    def hashes(self) -> tuple[str, ...]:
        return (self.sha256,) if isinstance(self.sha256, str) else self.sha256


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: tuple[_Entry, ...] = ()


class KeyFile:
    """Finds the owner of a key. Reads the file at once, and raises GatewaySettingsError where it cannot be used.

    A later version that cannot be used is logged, and the keys of the last good one stay.

    Args:
        when_read: told after each look at a new version whether it could be used.
    """

    def __init__(
        self,
        path: Path,
        *,
        now: Callable[[], float] = time.monotonic,
        when_read: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._path: Final = path
        self._now: Final = now
        self._when_read: Final = when_read
        self._version = _version(path)
        self._looked_at = now()
        self._keys = read_keys(path)
        when_read(True)

    def find(self, presented: bytes) -> ApiKey | None:
        """The owner of the key; None for a key of nobody."""
        self._look()
        digest = hashlib.sha256(presented).hexdigest()
        found: ApiKey | None = None
        for known, key in self._keys:  # all of them, so that the time tells nothing
            if hmac.compare_digest(known, digest):
                found = key
        return found

    def _look(self) -> None:
        if self._now() - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = self._now()
        version = _version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._keys = read_keys(self._path)
        except GatewaySettingsError as error:
            logger.error("key file refused, the last good one stays in use: %s", error)
            self._when_read(False)
        else:
            logger.info("key file read: %d keys", len(self._keys))
            self._when_read(True)


def _version(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def read_keys(path: Path) -> Sequence[tuple[str, ApiKey]]:
    """Each hash and its owner. Raises GatewaySettingsError, which quotes nothing that could be a key."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise GatewaySettingsError(f"the key file {path} cannot be read: {error.strerror}") from None
    if len(raw) > _MAX_BYTES:
        raise GatewaySettingsError(f"the key file {path} must be at most {_MAX_BYTES} bytes")
    try:
        entries = msgspec.convert(tomllib.loads(raw.decode()), _File).keys
    except UnicodeDecodeError:
        raise GatewaySettingsError(f"the key file {path} is not UTF-8") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise GatewaySettingsError(f"the key file {path} cannot be used: {error}") from None
    problems = _problems(entries)
    if problems:
        raise GatewaySettingsError(f"the key file {path} cannot be used: {'; '.join(problems)}")
    return [(digest, _key(entry)) for entry in entries for digest in entry.hashes]


def _problems(entries: Sequence[_Entry]) -> list[str]:
    problems: list[str] = [] if entries else ["it holds no [[keys]]"]
    names: set[str] = set()
    hashes: set[str] = set()
    for number, entry in enumerate(entries, 1):
        if not _NAME.fullmatch(entry.name):
            problems.append(f"name of key {number} must be 1 to 64 of the characters A-Z a-z 0-9 . _ -")
            continue
        if entry.name in names:
            problems.append(f"two keys have the name {entry.name}")
        if not entry.hashes or not all(map(_SHA256.fullmatch, entry.hashes)):
            problems.append(f"sha256 of {entry.name} must be 64 characters 0-9 a-f, or an array of such")
        elif hashes.intersection(entry.hashes) or len(set(entry.hashes)) < len(entry.hashes):
            problems.append(f"sha256 of {entry.name} is there twice")
        problems += [f"{problem} (key {entry.name})" for problem in name_problems("tenant", entry.tenant or "none")]
        names.add(entry.name)
        hashes.update(entry.hashes)
    return problems


def _key(entry: _Entry) -> ApiKey:
    return ApiKey(
        name=entry.name,
        tenant=entry.tenant,
        best_priority=entry.best_priority,
        models=None if entry.models is None else frozenset(entry.models),
        is_admin=entry.admin,
        requests_per_minute=entry.requests_per_minute,
        tokens_per_minute=entry.tokens_per_minute,
    )


def new_key(name: str, *, tenant: str | None = None) -> tuple[str, str]:
    """Make a key: the key itself, and its entry for the file. Raises GatewaySettingsError for a bad name."""
    key = f"sk-headrace-{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    problems = _problems([_Entry(name, digest, tenant)])
    if problems:
        raise GatewaySettingsError("; ".join(problems))
    lines = ["[[keys]]", f'name = "{name}"', f'sha256 = "{digest}"']
    if tenant is not None:
        lines.append(f"tenant = {msgspec.json.encode(tenant).decode()}")
    return key, "\n".join(lines) + "\n"
