"""`ServerUrl`: where the queue's Redis is, checked, and in the spellings that Celery, kombu and redis-py want.

redis://[user:password@]host:port/db
rediss://host:port/db?ssl_ca_certs=/etc/ca.pem                           over TLS
unix:///run/redis.sock?db=0                                              Celery's redis+socket:// is the same
sentinel://[user:password@]host:port,host:port,host:port/db?master=name  whatever server the Sentinels name
sentinels://...?ssl_ca_certs=/etc/ca.pem                                 the same, all over TLS
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Self
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from headrace_broker.errors import SettingsError

_FORMS: Final = "redis://host:port/db, rediss://..., unix:///path?db=0 or sentinel://host:port,host:port/db?master=name"
_ENCODED: Final = "in a password, @ : / ? # and % are written %40 %3A %2F %3F %23 and %25"
_SENTINEL_PORT: Final = 26379

# redis-py's names work everywhere; Celery's documentation uses the names of the ssl module.
_CERT_REQS: Final = {"CERT_REQUIRED": "required", "CERT_OPTIONAL": "optional", "CERT_NONE": "none"}
_TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_TLS_OPTIONS: Final = (*_TLS_FILES, "ssl_cert_reqs", "ssl_check_hostname")
_SENTINEL_OPTIONS: Final = ("master", "sentinel_username", "sentinel_password")
# Which redis-py's connections read; kombu takes the ones that it knows.
_SERVER_OPTIONS: Final = (
    "client_name",
    "health_check_interval",
    "max_connections",
    "retry_on_timeout",
    "socket_connect_timeout",
    "socket_keepalive",
    "socket_timeout",
)
_OPTION_NAME: Final = re.compile(r"[a-z]+(_[a-z]+)*")
_CREDENTIALS: Final = {"password", "passwd", "pass", "auth", "username", "user"}


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """One server, or the Sentinels that know which server it is; `text` is the one spelling of it."""

    text: str = field(repr=False)
    kind: Literal["tcp", "unix", "sentinel"]
    tls: bool
    hosts: tuple[tuple[str, int], ...]
    """The Sentinels; empty for other kinds."""
    path: str
    """Of the socket; empty for other kinds."""
    db: int
    username: str | None
    password: str | None = field(repr=False)
    options: Mapping[str, str] = field(repr=False)
    """What stood behind the question mark, but the database."""

    @classmethod
    def parse(cls, url: str) -> Self:
        """Raises SettingsError, which says what is wrong and shows no password."""
        try:
            parts = urlsplit(url)
            if parts.scheme in ("redis", "rediss"):
                _ = parts.port  # raises
        except ValueError:  # whose sentence may quote a password
            raise SettingsError(f"redis_url has a host or a port that cannot be one; {_ENCODED}") from None
        if parts.fragment or ("@" in parts.path and not parts.scheme.endswith(("unix", "socket"))):
            # the rest of a password, which would be shown as a host or a database
            raise SettingsError(f"redis_url has a # or a / in its password, or an @ behind its host; {_ENCODED}")
        options = dict(parse_qsl(parts.query))
        if _CREDENTIALS & options.keys():  # redis-py would read them, and kombu not
            raise SettingsError(
                "redis_url names a user or a password as an option: write redis://user:password@host:port/db;"
                f" {_ENCODED}"
            )
        match parts.scheme:
            case "redis" | "rediss" if parts.hostname:
                return cls._tcp(parts.scheme, parts.netloc, parts.path, options)
            case "unix" | "redis+socket":
                return cls._unix(parts.netloc, parts.path, options)
            case "sentinel" | "sentinels" if parts.netloc:
                return cls._sentinel(parts.scheme, parts.netloc, parts.path, options)
        # the URL itself may hold a password, so only its scheme is shown
        raise SettingsError(f"redis_url must look like {_FORMS}, not {parts.scheme}://...")

    @classmethod
    def _tcp(cls, scheme: str, netloc: str, path: str, options: dict[str, str]) -> Self:
        db = _database(path.lstrip("/") or options.get("db", ""))
        if options.pop("db", str(db)) != str(db):
            raise SettingsError(f"redis_url names two databases, {db} in its path and another one as db")
        _check_known(options, _SERVER_OPTIONS)
        _check_tls(options, tls=scheme == "rediss")
        text = urlunsplit((scheme, netloc, f"/{db}", urlencode(options), ""))
        username, password = _credentials(netloc)
        return cls(text, "tcp", scheme == "rediss", (), "", db, username, password, options)

    @classmethod
    def _unix(cls, netloc: str, path: str, options: dict[str, str]) -> Self:
        if netloc.rpartition("@")[2] or path in ("", "/"):
            raise SettingsError("redis_url must name its socket by a whole path, as unix:///run/redis.sock does")
        db = _database(options.pop("virtual_host", "") or options.pop("db", ""))
        _check_known(options, _SERVER_OPTIONS)
        _check_tls(options, tls=False)
        text = urlunsplit(("unix", netloc, path, urlencode({"db": db, **options}), ""))
        username, password = _credentials(netloc)
        # urlunsplit drops the slashes of an empty host
        text = text if "://" in text else text.replace("unix:", "unix://", 1)
        return cls(text, "unix", False, (), unquote(path), db, username, password, options)

    @classmethod
    def _sentinel(cls, scheme: str, netloc: str, path: str, options: dict[str, str]) -> Self:
        tls = scheme == "sentinels"
        hosts = tuple(_host_and_port(part) for part in netloc.rpartition("@")[2].split(","))
        db = _database(path.lstrip("/"))
        if not options.get("master"):
            raise SettingsError(
                f"redis_url must name the master that its Sentinels watch: {scheme}://.../0?master=name"
            )
        _check_known(options, _SENTINEL_OPTIONS)
        _check_tls(options, tls=tls)
        username, password = _credentials(netloc)
        text = urlunsplit((scheme, netloc, f"/{db}", urlencode(options), ""))
        return cls(text, "sentinel", tls, hosts, "", db, username, password, options)

    @property
    def safe(self) -> str:
        """Without password and options: fit for logs and error messages."""
        parts = urlsplit(self.text)
        master = f"master={quote(self.master)}" if self.kind == "sentinel" else ""
        text = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, master, ""))
        return text if "://" in text else text.replace("unix:", "unix://", 1)

    @property
    def master(self) -> str:
        """The name under which Sentinels know the server."""
        return self.options["master"]

    @property
    def tls_options(self) -> dict[str, Any]:
        """As redis-py's connections take them."""
        found: dict[str, Any] = {name: self.options[name] for name in _TLS_OPTIONS if name in self.options}
        if "ssl_check_hostname" in found:
            found["ssl_check_hostname"] = found["ssl_check_hostname"] == "true"
        return found

    @property
    def connection_options(self) -> dict[str, Any]:
        """Database, user and TLS of the master behind Sentinels, as redis-py's pools take them."""
        found: dict[str, Any] = {"db": self.db, "username": self.username, "password": self.password}
        return found | ({"ssl": True, **self.tls_options} if self.tls else {})

    @property
    def sentinel_options(self) -> dict[str, Any]:
        """How the Sentinels themselves are reached: arguments of redis-py's client."""
        names = {"username": "sentinel_username", "password": "sentinel_password"}
        found: dict[str, Any] = {name: self.options[given] for name, given in names.items() if given in self.options}
        return found | ({"ssl": True, **self.tls_options} if self.tls else {})

    @property
    def userinfo(self) -> str:
        """`user:password@` as it is spelled in URLs; empty where there is none."""
        userinfo, at, _ = urlsplit(self.text).netloc.rpartition("@")
        return userinfo + at


def _credentials(netloc: str) -> tuple[str | None, str | None]:
    username, _, password = netloc.rpartition("@")[0].partition(":")
    return unquote(username) or None, unquote(password) or None


def _database(text: str) -> int:
    if text and not (text.isascii() and text.isdigit()):
        raise SettingsError(f"redis_url must name its database by a number, not by {text!r}")
    return int(text or 0)


def _host_and_port(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host:
        raise SettingsError(f"redis_url must list Sentinels as host:port,host:port, not {text!r}")
    return host, port or _SENTINEL_PORT


def _check_known(options: Mapping[str, str], known: tuple[str, ...]) -> None:
    """Refuse what no library reads. Options of TLS have a check of their own."""
    unknown = sorted(name for name in options if name not in known and not name.startswith("ssl_"))
    if unknown:
        # with a question mark in a password, anything may stand here
        named = [name for name in unknown if _OPTION_NAME.fullmatch(name)]
        names = f": {', '.join(named)}" if named == unknown else ""
        raise SettingsError(f"redis_url has unknown options{names}; known are {', '.join((*known, *_TLS_OPTIONS))}")


def _check_tls(options: dict[str, str], *, tls: bool) -> None:
    """Brings the options of TLS into redis-py's spelling. A library's own error would not say which file it missed."""
    given = [name for name in options if name.startswith("ssl_")]
    if given and not tls:
        raise SettingsError(f"redis_url has {', '.join(given)}, which need TLS: rediss:// or sentinels://")
    if not tls:
        return
    unknown = sorted(set(given) - set(_TLS_OPTIONS))
    if unknown:
        raise SettingsError(f"redis_url has unknown options: {', '.join(unknown)}; of TLS: {', '.join(_TLS_OPTIONS)}")
    reqs = options.get("ssl_cert_reqs", "required")
    options["ssl_cert_reqs"] = _CERT_REQS.get(reqs, reqs)
    if options["ssl_cert_reqs"] not in _CERT_REQS.values():
        raise SettingsError(f"ssl_cert_reqs must be required, optional or none, not {reqs!r}")
    check = options.get("ssl_check_hostname", "true").lower()
    if check not in ("true", "false"):
        raise SettingsError(f"ssl_check_hostname must be true or false, not {check!r}")
    if "ssl_check_hostname" in options:
        options["ssl_check_hostname"] = check
    for name in _TLS_FILES:
        if name in options and not Path(options[name]).is_file():
            raise SettingsError(f"{name} must be a file, but there is none at {options[name]!r}")
