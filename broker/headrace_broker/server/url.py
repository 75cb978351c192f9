"""`ServerUrl`: the checked address of the queue's Redis, in the formats of Celery, kombu and redis-py.

redis://[user:password@]host:port/db
rediss://host:port/db?ssl_ca_certs=/etc/ca.pem                           over TLS
unix:///run/redis.sock?db=0                                              Celery's redis+socket:// means the same
sentinel://[user:password@]host:port,host:port,host:port/db?master=name  the master that the Sentinels name
sentinels://...?ssl_ca_certs=/etc/ca.pem                                 Sentinels and master over TLS
redis+cluster://[user:password@]host:port,host:port                      some nodes of a Cluster; stream servers only
rediss+cluster://...?ssl_ca_certs=/etc/ca.pem                            the same over TLS
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Self
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from headrace_broker.errors import SettingsError

_FORMS: Final = "redis://host:port/db, rediss://..., unix:///path?db=0 or sentinel://host:port,host:port/db?master=name"
_NO_CLUSTER: Final = (
    "no release of kombu, Celery's library for queues, can use a Cluster. Set HEADRACE_QUEUE_URLS to give models"
    " servers of their own, and name the Cluster in HEADRACE_STREAM_URLS: it can have the streams"
)
_CLUSTER_SCHEMES: Final = ("redis+cluster", "rediss+cluster")
_OTHER_CLUSTER_SCHEMES: Final = ("rediscluster", "redisscluster", "cluster")
_ENCODED: Final = "in a password, @ : / ? # and % are written %40 %3A %2F %3F %23 and %25"
_SENTINEL_PORT: Final = 26379
_CLUSTER_PORT: Final = 6379
_MOST_DATABASE: Final = 2**31 - 1
"""Redis has an `int` for the number. A server may have fewer databases."""

# redis-py's names work everywhere; Celery's documentation uses the names of the ssl module.
_CERT_REQS: Final = {"CERT_REQUIRED": "required", "CERT_OPTIONAL": "optional", "CERT_NONE": "none"}
_TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_TLS_OPTIONS: Final = (*_TLS_FILES, "ssl_cert_reqs", "ssl_check_hostname")
_SENTINEL_OPTIONS: Final = ("master", "sentinel_username", "sentinel_password")
# Options that redis-py's connections read. kombu reads some of them.
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
    """A single server, the Sentinels that name the master, or nodes of a Cluster. `text` is the normalised URL."""

    text: str = field(repr=False)
    kind: Literal["tcp", "unix", "sentinel", "cluster"]
    tls: bool
    hosts: tuple[tuple[str, int], ...]
    """Addresses of the Sentinels, or of nodes of the Cluster; empty for other kinds."""
    path: str
    """Path of the socket; empty for other kinds."""
    db: int
    username: str | None
    password: str | None = field(repr=False)
    options: Mapping[str, str] = field(repr=False)
    """The URL's query options, without the database."""

    @classmethod
    def parse(cls, url: str, *, may_be_cluster: bool = False) -> Self:
        """Parse and check a URL. Raises SettingsError, which names the problem and shows no password.

        `may_be_cluster`: the server has streams only, so a Redis Cluster will do.
        """
        try:
            parts = urlsplit(url)
            if parts.scheme in ("redis", "rediss"):
                _ = parts.port  # raises
        except ValueError:  # its message may quote a password
            raise SettingsError(f"redis_url has an invalid host or port; {_ENCODED}") from None
        if parts.fragment or ("@" in parts.path and not parts.scheme.endswith(("unix", "socket"))):
            # the rest of a password, which would be shown as a host or a database
            raise SettingsError(f"redis_url has a # or a / in its password, or an @ after its host; {_ENCODED}")
        options = dict(parse_qsl(parts.query))
        if _CREDENTIALS & options.keys():  # redis-py would read them, but kombu would not
            raise SettingsError(
                "redis_url gives a user or a password as an option: write redis://user:password@host:port/db;"
                f" {_ENCODED}"
            )
        match parts.scheme:
            case "redis" | "rediss" if parts.hostname and "," not in parts.hostname:
                return cls._tcp(parts.scheme, parts.netloc, parts.path, options)
            case "unix" | "redis+socket":
                return cls._unix(parts.netloc, parts.path, options)
            case "sentinel" | "sentinels" if parts.netloc:
                return cls._sentinel(parts.scheme, parts.netloc, parts.path, options)
            case "redis+cluster" | "rediss+cluster" if parts.netloc and may_be_cluster:
                return cls._cluster(parts.scheme, parts.netloc, parts.path, options)
        if may_be_cluster and parts.scheme in (*_CLUSTER_SCHEMES, *_OTHER_CLUSTER_SCHEMES):
            raise SettingsError(
                f"redis_url must name nodes of its Redis Cluster as redis+cluster://host:port,host:port, not"
                f" {parts.scheme}://..."
            )
        if parts.scheme in (*_CLUSTER_SCHEMES, *_OTHER_CLUSTER_SCHEMES):
            raise SettingsError(
                f"redis_url must name one server or its Sentinels, not a Redis Cluster ({parts.scheme}://...): "
                f"{_NO_CLUSTER}"
            )
        # the URL itself may hold a password, so only its scheme is shown
        raise SettingsError(f"redis_url must look like {_FORMS}, not {parts.scheme}://...")

    @classmethod
    def _tcp(cls, scheme: str, netloc: str, path: str, options: dict[str, str]) -> Self:
        db = _database(path.lstrip("/") or options.get("db", ""))
        if options.pop("db", str(db)) != str(db):
            raise SettingsError(f"redis_url names two databases: {db} in its path and another in its option db")
        _check_options(options, _SERVER_OPTIONS, tls=scheme == "rediss")
        text = urlunsplit((scheme, netloc, f"/{db}", urlencode(options), ""))
        username, password = _credentials(netloc)
        return cls(text, "tcp", scheme == "rediss", (), "", db, username, password, options)

    @classmethod
    def _unix(cls, netloc: str, path: str, options: dict[str, str]) -> Self:
        if netloc.rpartition("@")[2] or path in ("", "/"):
            raise SettingsError("redis_url must name its socket by an absolute path, such as unix:///run/redis.sock")
        db = _database(options.pop("virtual_host", "") or options.pop("db", ""))
        _check_options(options, _SERVER_OPTIONS, tls=False)
        text = urlunsplit(("unix", netloc, path, urlencode({"db": db, **options}), ""))
        username, password = _credentials(netloc)
        # urlunsplit drops the slashes of an empty host
        text = text if "://" in text else text.replace("unix:", "unix://", 1)
        return cls(text, "unix", False, (), unquote(path), db, username, password, options)

    @classmethod
    def _sentinel(cls, scheme: str, netloc: str, path: str, options: dict[str, str]) -> Self:
        tls = scheme == "sentinels"
        hosts = _addresses(netloc, "Sentinels", _SENTINEL_PORT)
        db = _database(path.lstrip("/"))
        if not options.get("master"):
            raise SettingsError(
                f"redis_url must name the master that its Sentinels watch: {scheme}://.../0?master=name"
            )
        _check_options(options, _SENTINEL_OPTIONS, tls=tls)
        username, password = _credentials(netloc)
        text = urlunsplit((scheme, netloc, f"/{db}", urlencode(options), ""))
        return cls(text, "sentinel", tls, hosts, "", db, username, password, options)

    @classmethod
    def _cluster(cls, scheme: str, netloc: str, path: str, options: dict[str, str]) -> Self:
        tls = scheme == "rediss+cluster"
        hosts = _addresses(netloc, "nodes of the Cluster", _CLUSTER_PORT)
        db = _database(path.lstrip("/"))
        if db:
            raise SettingsError(f"redis_url names the database {db}, and a Redis Cluster has only database 0")
        _check_options(options, (), tls=tls)
        username, password = _credentials(netloc)
        text = urlunsplit((scheme, netloc, "/0", urlencode(options), ""))
        return cls(text, "cluster", tls, hosts, "", 0, username, password, options)

    @property
    def safe(self) -> str:
        """The URL without password and options, for logs and error messages."""
        parts = urlsplit(self.text)
        master = f"master={quote(self.master)}" if self.kind == "sentinel" else ""
        text = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, master, ""))
        return text if "://" in text else text.replace("unix:", "unix://", 1)

    @property
    def master(self) -> str:
        """The name of the master at the Sentinels."""
        return self.options["master"]

    @property
    def tls_options(self) -> dict[str, Any]:
        """The TLS options as arguments of redis-py's connections."""
        found: dict[str, Any] = {name: self.options[name] for name in _TLS_OPTIONS if name in self.options}
        if "ssl_check_hostname" in found:
            found["ssl_check_hostname"] = found["ssl_check_hostname"] == "true"
        return found

    @property
    def connection_options(self) -> dict[str, Any]:
        """Database, user and TLS options of the master behind Sentinels, or of the nodes of a Cluster, as arguments of
        redis-py's pools.
        """
        found: dict[str, Any] = {"db": self.db, "username": self.username, "password": self.password}
        return found | ({"ssl": True, **self.tls_options} if self.tls else {})

    @property
    def sentinel_options(self) -> dict[str, Any]:
        """User and TLS options of the Sentinels themselves, as arguments of redis-py's client."""
        names = {"username": "sentinel_username", "password": "sentinel_password"}
        found: dict[str, Any] = {name: self.options[given] for name, given in names.items() if given in self.options}
        return found | ({"ssl": True, **self.tls_options} if self.tls else {})

    @property
    def userinfo(self) -> str:
        """`user:password@` as URLs spell it; empty if the URL has none."""
        userinfo, at, _ = urlsplit(self.text).netloc.rpartition("@")
        return userinfo + at


def _credentials(netloc: str) -> tuple[str | None, str | None]:
    username, _, password = netloc.rpartition("@")[0].partition(":")
    return unquote(username) or None, unquote(password) or None


def _database(text: str) -> int:
    digits = text.lstrip("0") or "0"
    if not ((text.isascii() and text.isdigit()) or not text):
        raise SettingsError(f"redis_url must name its database by a number, not by {text!r}")
    if len(digits) > len(str(_MOST_DATABASE)) or int(digits) > _MOST_DATABASE:
        raise SettingsError(
            f"redis_url must name its database by a number up to {_MOST_DATABASE}, not by {text[:20]!r}"
        )
    return int(digits)


def _addresses(netloc: str, what: str, port: int) -> tuple[tuple[str, int], ...]:
    return tuple(_host_and_port(part, what, port) for part in netloc.rpartition("@")[2].split(","))


def _host_and_port(text: str, what: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host:
        raise SettingsError(f"redis_url must list {what} as host:port,host:port, not {text!r}")
    return host, port or default_port


def _check_options(options: dict[str, str], known: tuple[str, ...], *, tls: bool) -> None:
    """Refuse options that no library reads, and convert those of TLS to redis-py's spelling.

    Missing TLS files are refused, too, because redis-py's own error would not name the file.
    """
    if unknown := sorted(name for name in options if name not in known and not name.startswith("ssl_")):
        # if the password has a question mark, these may be parts of the password
        named = [name for name in unknown if _OPTION_NAME.fullmatch(name)]
        names = f": {', '.join(named)}" if named == unknown else ""
        raise SettingsError(f"redis_url has unknown options{names}; known are {', '.join((*known, *_TLS_OPTIONS))}")
    given = [name for name in options if name.startswith("ssl_")]
    if given and not tls:
        raise SettingsError(
            f"redis_url has {', '.join(given)}, which need TLS: rediss://, sentinels:// or rediss+cluster://"
        )
    if not tls:
        return
    if unknown := sorted(set(given) - set(_TLS_OPTIONS)):
        raise SettingsError(f"redis_url has unknown TLS options {', '.join(unknown)}; known: {', '.join(_TLS_OPTIONS)}")
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
            raise SettingsError(f"{name} must name an existing file, not {options[name]!r}")
