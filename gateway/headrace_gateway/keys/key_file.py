"""`KeyFile`: the API keys of a gateway, reloaded when the file changes.

    [[keys]]
    name = "website"
    sha256 = "5c7d..."          # an array of several while a key is replaced
    tenant = "acme"
    best_priority = 3
    models = ["tiny"]
    requests_per_minute = 600
    tokens_per_minute = 100000
    tokens_per_day = 5000000
    admin = false

Only `name` and `sha256` are required. The file contains only hashes. Keys are long and random, so a fast hash suffices.
"""

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec

from headrace_gateway.errors import GatewaySettingsError
from headrace_gateway.keys.api_key import NAME, ApiKey
from headrace_gateway.watched_file import WatchedFile, read_toml
from headrace_wire.request import name_problems

_SHA256: Final = re.compile(r"[0-9a-f]{64}")

_Positive = Annotated[int, msgspec.Meta(ge=1, le=10**12)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    sha256: str | tuple[str, ...]
    tenant: str | None = None
    best_priority: Annotated[int, msgspec.Meta(ge=0, le=9)] = 0
    models: tuple[str, ...] | None = None
    requests_per_minute: _Positive | None = None
    tokens_per_minute: _Positive | None = None
    tokens_per_day: _Positive | None = None
    admin: bool = False

    @property
    def hashes(self) -> tuple[str, ...]:
        return (self.sha256,) if isinstance(self.sha256, str) else self.sha256


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: tuple[_Entry, ...] = ()


class KeyFile:
    """Finds the owner of a key in the last valid version of the file.

    Args:
        when_read: called after each read of a new version; its argument says whether the version is valid.

    Raises:
        GatewaySettingsError: the first version cannot be used.
    """

    def __init__(
        self,
        path: Path,
        *,
        now: Callable[[], float] = time.monotonic,
        when_read: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._file: Final = WatchedFile("key file", path, read_keys, now=now, when_read=when_read)

    def find(self, presented: bytes) -> ApiKey | None:
        """Return the owner of the key; None if the key is unknown."""
        digest = hashlib.sha256(presented).hexdigest()
        found: ApiKey | None = None
        for known, key in self._file.content():  # compare with all of them, so that the time reveals nothing
            if hmac.compare_digest(known, digest):
                found = key
        return found


def read_keys(path: Path) -> Sequence[tuple[str, ApiKey]]:
    """Return each hash and its owner. Raises GatewaySettingsError, which quotes nothing that could be a key."""
    document, _ = read_toml("key file", path)
    try:
        entries = msgspec.convert(document, _File).keys
    except msgspec.ValidationError as error:
        raise GatewaySettingsError(f"the key file {path} cannot be used: {error}") from None
    problems = _problems(entries)
    if problems:
        raise GatewaySettingsError(f"the key file {path} cannot be used: {'; '.join(problems)}")
    return [(digest, _key(entry)) for entry in entries for digest in entry.hashes]


def _problems(entries: Sequence[_Entry]) -> list[str]:
    problems: list[str] = [] if entries else ["it has no [[keys]]"]
    names: set[str] = set()
    hashes: set[str] = set()
    for number, entry in enumerate(entries, 1):
        if not NAME.fullmatch(entry.name):
            problems.append(
                f"name of key {number} must be 1 to 64 of the characters A-Z a-z 0-9 . _ -, got {entry.name[:80]!r}"
            )
            continue
        if entry.name in names:
            problems.append(f"two keys have the name {entry.name}")
        if not entry.hashes or not all(map(_SHA256.fullmatch, entry.hashes)):
            problems.append(f"sha256 of {entry.name} must be 64 characters 0-9 a-f, or a list of such")
        elif hashes.intersection(entry.hashes) or len(set(entry.hashes)) < len(entry.hashes):
            problems.append(f"sha256 of {entry.name} is used twice")
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
        tokens_per_day=entry.tokens_per_day,
    )


def new_key(name: str, *, tenant: str | None = None) -> tuple[str, str]:
    """Make a key; return the key and its entry for the file. Raises GatewaySettingsError for an invalid name."""
    key = f"sk-headrace-{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    problems = _problems([_Entry(name, digest, tenant)])
    if problems:
        raise GatewaySettingsError("; ".join(problems))
    lines = ["[[keys]]", f'name = "{name}"', f'sha256 = "{digest}"']
    if tenant is not None:
        lines.append(f"tenant = {msgspec.json.encode(tenant).decode()}")
    return key, "\n".join(lines) + "\n"
