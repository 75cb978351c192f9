"""What the gateway can be told. The queue's own settings are the broker's."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from headrace_broker.settings import DEFAULT_REDIS_URL

MAX_BODY_BYTES: Final = 4 * 2**20


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Where the gateway listens and what it allows. All times are seconds, all sizes bytes."""

    redis_url: str = field(default=DEFAULT_REDIS_URL, repr=False)
    host: str = "127.0.0.1"
    port: int = 8000
    keys: Path | None = None
    """The key file. Without one the gateway listens on loopback only."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of browsers that may call from another site; `*`: all."""
    max_body_bytes: int = MAX_BODY_BYTES
    hold_status: float = 10.0
    """A stream's HTTP status waits so long for the first entry: a refusal by a worker can then still be a 400."""
    keep_alive: float = 15.0
    """Time without output after which a stream carries a comment, for proxies."""
    expires: float = 3600.0
    """Life of a request whose caller names none."""
    abandon_after: float = 30.0
    """A request ends when its stream was not read for so long; 0: never."""
    shutdown: float = 10.0
    """How long open connections may go on after SIGTERM."""
