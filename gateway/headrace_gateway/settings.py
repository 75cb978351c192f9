"""The gateway's settings. The queue's own settings are in the broker."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from headrace_broker.settings import DEFAULT_REDIS_URL
from headrace_gateway.errors import GatewaySettingsError
from headrace_wire import environment
from headrace_wire.option import option, options_of, problems_of

MAX_BODY_BYTES: Final = 4 * 2**20
GATEWAY_PREFIX: Final = "HEADRACE_GATEWAY"
"""Prefix of the environment variables."""
_ORIGIN: Final = re.compile(r"\*|https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:.]+\](:[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Where the gateway listens, and its limits. All times are in seconds, all sizes in bytes."""

    redis_url: str = field(default=DEFAULT_REDIS_URL, repr=False)
    host: str = option("127.0.0.1", "Address to listen on; --keys is required unless it is loopback.", metavar="HOST")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", metavar="PORT", least=0, most=65535)
    keys: Path | None = option(
        None, "File of API keys, see `headrace gateway-key`. None: loopback only.", metavar="FILE"
    )
    webhooks: Path | None = option(
        None,
        "File of endpoints that get webhooks when answers end, see `headrace webhook-secret`. None: no webhooks.",
        metavar="FILE",
    )
    allow_origin: tuple[str, ...] = option(
        (),
        "Allow calls from web pages of this origin, or * for all. May be repeated; spaces separate origins in the "
        "variable.",
        metavar="ORIGIN",
    )
    max_body_bytes: int = option(MAX_BODY_BYTES, "Maximum size of a request's body.", metavar="N", least=1024)
    strict: bool = option(False, "Refuse unknown and unsupported fields instead of ignoring them.")
    head_timeout: float = option(
        10.0,
        "Time in which a request's head must arrive; silent connections are closed after it.",
        metavar="S",
        least=0.1,
    )
    body_timeout: float = option(
        30.0,
        "Time in which a body must arrive, or at least 1 KiB of it for each second.",
        metavar="S",
        least=0.1,
    )
    hold_status: float = option(
        10.0,
        "How long a stream's HTTP status is held back, so that a refusal by a worker can become a 400.",
        metavar="S",
        least=0,
    )
    keep_alive: float = option(
        15.0, "Idle time after which a stream carries a comment, for proxies.", metavar="S", least=0.1
    )
    expires: float = option(3600.0, "Expiry time of requests that set none.", metavar="S", least=1)
    abandon_after: float = option(
        30.0, "Cancel a request if no client reads its answer for this long; 0: never.", metavar="S", least=0
    )
    store_life: float = option(
        86_400.0, "How long a stored response is kept in Redis after its end.", metavar="S", least=60
    )
    max_stored_bytes: int = option(
        256 * 2**20,
        "Maximum that the large requests of one tenant, or of one key without a tenant, keep in Redis; never more than "
        "a quarter of its maxmemory.",
        metavar="N",
        least=8 * 2**20,
    )
    shutdown: float = option(
        10.0,
        "How long open answers may continue after SIGTERM; then clients rejoin at another replica.",
        metavar="S",
        least=0,
    )
    files: Path | None = option(
        None, "Directory of uploads and batches, shared by all replicas. None: no files, no batches.", metavar="FOLDER"
    )
    max_file_bytes: int = option(200 * 2**20, "Maximum size of an upload.", metavar="N", least=1024)
    max_kept_bytes: int = option(10 * 2**30, "Maximum total size of one key's files.", metavar="N", least=1024)
    batch_window: int = option(
        256,
        "Maximum number of batch lines that one replica has in the queue; each 64 KiB of a line count as one.",
        metavar="N",
        least=1,
    )
    batch_priority: int = option(
        9, "Highest priority of a batch line; 9 is the lowest.", metavar="0..9", least=0, most=9
    )
    metrics_host: str = option("127.0.0.1", "Address of /metrics.", metavar="HOST")
    metrics_port: int | None = option(
        None, "Port of /metrics; 0 takes a free one. None: no metrics.", metavar="PORT", least=0, most=65535
    )
    log_level: str = option("INFO", "Minimum log level.", choices=("DEBUG", "INFO", "WARNING", "ERROR"))

    def __post_init__(self) -> None:
        """Raise GatewaySettingsError that lists every problem."""
        problems = problems_of(self)
        if self.keys is None and not is_loopback(self.host):
            problems.append(
                f"host must be a loopback address without a key file, got {self.host!r}; "
                "make keys with `headrace gateway-key` and pass their file with --keys"
            )
        problems += [
            f"allow_origin must be * or a scheme and a host such as https://chat.example.org, got {origin!r}"
            for origin in self.allow_origin
            if not _ORIGIN.fullmatch(origin)
        ]
        if problems:
            raise GatewaySettingsError("; ".join(problems))

    @classmethod
    def from_env(cls, environ: Mapping[str, str], **given: Any) -> Self:
        """Read the variables `HEADRACE_GATEWAY_*`. Arguments override them. Raises GatewaySettingsError."""
        values, problems = environment.read(options_of(cls), environ, GATEWAY_PREFIX)
        if problems:
            raise GatewaySettingsError("; ".join(problems))
        return cls(**{**values, **given})


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address. A name other than localhost may resolve to anything."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
