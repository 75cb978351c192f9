"""The gateway's settings. The queue's own settings are in the broker."""

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from headrace_broker.settings import DEFAULT_REDIS_URL
from headrace_gateway.errors import GatewaySettingsError

MAX_BODY_BYTES: Final = 4 * 2**20
_ORIGIN: Final = re.compile(r"\*|https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:.]+\](:[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Where the gateway listens, and its limits. All times are in seconds, all sizes in bytes."""

    redis_url: str = field(default=DEFAULT_REDIS_URL, repr=False)
    host: str = "127.0.0.1"
    port: int = 8000
    keys: Path | None = None
    """The key file. Without one the gateway listens on loopback only."""
    webhooks: Path | None = None
    """The webhook file. Without one no webhooks are sent."""
    allowed_origins: tuple[str, ...] = ()
    """Browser origins that may call from another site; `*`: all."""
    max_body_bytes: int = MAX_BODY_BYTES
    hold_status: float = 10.0
    """How long a stream's HTTP status waits for the first entry, so that a worker's refusal can become a 400."""
    keep_alive: float = 15.0
    """Idle time after which a stream carries a comment, for proxies."""
    expires: float = 3600.0
    """Expiry of a request that sets none."""
    abandon_after: float = 30.0
    """A request is cancelled if its stream was not read for this long; 0: never."""
    store_life: float = 86_400.0
    """How long a stored response is kept after its end."""
    shutdown: float = 10.0
    """How long open connections may continue after SIGTERM."""

    files: Path | None = None
    """Directory of uploaded files and batches, which all replicas share. Without one both are off."""
    max_file_bytes: int = 200 * 2**20
    max_kept_bytes: int = 10 * 2**30
    """Total size of the files of one API key, above which it cannot upload."""
    batch_window: int = 256
    """Lines of batches that one replica has in the queue at a time."""
    batch_priority: int = 9
    """The best priority of a batch line; 9 is served last."""

    def __post_init__(self) -> None:
        """Raise GatewaySettingsError that lists every problem."""
        problems = []
        if self.keys is None and not is_loopback(self.host):
            problems.append(
                f"host must be a loopback address without a key file, got {self.host!r}; "
                "make keys with `headrace gateway-key` and pass their file with --keys"
            )
        problems += [
            f"allow-origin must be * or a scheme and a host such as https://chat.example.org, got {origin!r}"
            for origin in self.allowed_origins
            if not _ORIGIN.fullmatch(origin)
        ]
        least = {
            "max_body_bytes": 1024,
            "hold_status": 0.0,
            "keep_alive": 0.1,
            "expires": 1.0,
            "abandon_after": 0.0,
            "store_life": 60.0,
            "shutdown": 0.0,
            "max_file_bytes": 1024,
            "max_kept_bytes": 1024,
            "batch_window": 1,
            "batch_priority": 0,
        }
        for name, low in least.items():
            value = getattr(self, name)
            if not low <= value < float("inf"):
                problems.append(f"{name.replace('_', '-')} must be at least {low:g}, got {value}")
        if self.batch_priority > 9:
            problems.append(f"batch-priority must be at most 9, got {self.batch_priority}")
        if problems:
            raise GatewaySettingsError("; ".join(problems))


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address. A name other than localhost may resolve to anything."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
