"""The webhook file: the endpoints, the events that each subscribes to, and the secrets that sign them.

    [[endpoints]]
    name = "billing"
    url = "https://hooks.example.org/headrace"
    secret = "whsec_..."        # an array of two while a secret is replaced
    tenant = "acme"
    keys = ["website"]
    types = ["batch.completed", "batch.failed"]
    allow_http = false
    allow_private = false

Only `name`, `url` and `secret` are required.
"""

import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from headrace_gateway.errors import GatewaySettingsError
from headrace_gateway.keys.api_key import NAME
from headrace_gateway.watched_file import read_toml
from headrace_gateway.webhooks.event import EVENT_TYPES, Event
from headrace_gateway.webhooks.network import refusal_of
from headrace_gateway.webhooks.secret import FORM, secret_bytes
from headrace_wire.request import name_problems

_WHAT: Final = "webhook file"
_URL: Final = re.compile(r"[!-~]{1,2048}")
_HEADING: Final = re.compile(r"\s*\[\[\s*endpoints\s*\]\]")
_IP: Final = re.compile(r"[0-9.]+|.*:.*")
_MOST_SECRETS: Final = 2


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A receiver of webhooks."""

    name: str
    url: str = field(repr=False)
    """The URL is never logged: its query may hold a secret."""
    secrets: tuple[bytes, ...] = field(repr=False)
    tenant: str | None = None
    """Only objects of this tenant; None: of every tenant."""
    keys: frozenset[str] | None = None
    """Only objects of the API keys with these names; None: of every key."""
    types: frozenset[str] = frozenset(EVENT_TYPES)
    allow_private: bool = False

    def wants(self, event: Event) -> bool:
        return (
            event.type in self.types
            and self.tenant in (None, event.tenant)
            and (self.keys is None or event.key in self.keys)
        )


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    url: str
    secret: str | tuple[str, ...]
    tenant: str | None = None
    keys: tuple[str, ...] | None = None
    types: tuple[str, ...] = EVENT_TYPES
    allow_http: bool = False
    allow_private: bool = False

    @property
    def secrets(self) -> tuple[str, ...]:
        return (self.secret,) if isinstance(self.secret, str) else self.secret


def read_endpoints(path: Path) -> Mapping[str, Endpoint]:
    """Return the endpoints by name. Raises GatewaySettingsError, which quotes no URL and no secret."""
    document, text = read_toml(_WHAT, path)
    problems = _mode_problems(path)
    entries = document.pop("endpoints", [])
    problems += [f"unknown field {name[:64]!r}" for name in document]
    if not isinstance(entries, list) or not entries:
        problems.append("it has no [[endpoints]]")
        entries = []
    lines = [number for number, line in enumerate(text.splitlines(), 1) if _HEADING.match(line)]
    found: dict[str, Endpoint] = {}
    for number, raw in enumerate(entries):
        where = f"line {lines[number]}" if len(lines) == len(entries) else f"endpoint {number + 1}"
        endpoint, wrong = _endpoint(raw, found)
        problems += [f"{where}: {problem}" for problem in wrong]
        if endpoint is not None:
            found[endpoint.name] = endpoint
    if problems:
        raise GatewaySettingsError(f"the {_WHAT} {path} cannot be used: {'; '.join(problems)}")
    return found


def _mode_problems(path: Path) -> list[str]:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return []
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        return [f"it contains secrets, but any user may read or write it (mode {mode:04o}): chmod o= {path}"]
    return []


def _endpoint(raw: Any, others: Mapping[str, Endpoint]) -> tuple[Endpoint | None, Sequence[str]]:
    """Return the endpoint of one table, or all its problems."""
    try:
        entry = msgspec.convert(raw, _Entry)
    except msgspec.ValidationError as error:
        return None, [str(error)]
    problems = []
    if not NAME.fullmatch(entry.name):
        problems.append(f"name must be 1 to 64 of the characters A-Z a-z 0-9 . _ -, got {entry.name[:80]!r}")
    elif entry.name in others:
        problems.append(f"two endpoints have the name {entry.name}")
    problems += _url_problems(entry)
    secrets = [secret_bytes(secret) for secret in entry.secrets]
    if not 1 <= len(secrets) <= _MOST_SECRETS or None in secrets:
        problems.append(
            f"secret must be {FORM}, or a list of at most {_MOST_SECRETS} such; see headrace webhook-secret"
        )
    problems += name_problems("tenant", entry.tenant or "none")
    if entry.keys is not None and not (entry.keys and all(map(NAME.fullmatch, entry.keys))):
        problems.append(f"keys must be a list of the names of API keys, got {list(entry.keys)}")
    if not entry.types or not set(entry.types) <= set(EVENT_TYPES):
        problems.append(f"types must be a list of {', '.join(EVENT_TYPES)}, got {list(entry.types)}")
    if problems:
        return None, problems
    return (
        Endpoint(
            name=entry.name,
            url=entry.url,
            secrets=tuple(secret for secret in secrets if secret is not None),
            tenant=entry.tenant,
            keys=None if entry.keys is None else frozenset(entry.keys),
            types=frozenset(entry.types),
            allow_private=entry.allow_private,
        ),
        [],
    )


def _url_problems(entry: _Entry) -> list[str]:
    try:
        url = urlsplit(entry.url)
        port = url.port
    except ValueError:
        return ["url is not a valid URL"]
    if not _URL.fullmatch(entry.url):
        return ["url must be 1 to 2048 printable ASCII characters without spaces"]
    if url.scheme not in ("https", "http") or not url.hostname or port == 0:
        return ["url must be https:// with a host, such as https://hooks.example.org/headrace"]
    problems = []
    if url.scheme == "http" and not entry.allow_http:
        problems.append("url must begin with https://; allow_http = true permits http://")
    if "@" in url.netloc:
        problems.append("url must not contain a user name or a password")
    if "#" in entry.url:
        problems.append("url must not contain a fragment")
    if _IP.fullmatch(url.hostname):
        refusal = refusal_of(url.hostname, allow_private=entry.allow_private)
        problems += [] if refusal is None else [f"url must lead to a public address: {refusal}"]
    return problems
