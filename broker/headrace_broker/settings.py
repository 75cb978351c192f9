"""The settings of the queue that producers, subscribers and workers share. Engine settings are elsewhere."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Self

from headrace_broker.errors import SettingsError
from headrace_broker.fair_share import parse_weights
from headrace_broker.server_url import ServerUrl

DEFAULT_REDIS_URL: Final = "redis://127.0.0.1:6379/0"

_BOOLEANS: Final = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """Address, lifetimes and limits of the queue. All times are in seconds."""

    redis_url: str = field(default=DEFAULT_REDIS_URL, repr=False)
    lease_seconds: float = 15.0
    """A worker that does not renew its leases for this long loses its messages to other workers."""
    result_ttl_seconds: int = 600
    """How long a stream lives after its last entry, and a result after it was stored."""
    delivery_limit: int = 5
    """How often a message is delivered to workers before it becomes a dead letter."""
    max_queued_requests: int = 0
    """Clients refuse to submit to a queue that holds this many requests; 0: no limit."""
    max_queued_requests_per_tenant: int = 0
    """The same limit for each tenant in a queue; workers refuse requests beyond it that other producers sent."""
    ageing_seconds: float = 120.0
    """A request gains one priority step (9, 6, 3, 0) each time it has waited this long; 0: never."""
    prefix_affinity: bool = False
    """A worker prefers, among the next tenant's requests, a prompt that begins like one it ran recently."""
    tenant_weights: str = ""
    """Shares of a queue, in tokens, for some tenants, such as `acme=4,beta=0.5`; other tenants have 1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "redis_url", ServerUrl.parse(self.redis_url).text)
        _check_range("lease_seconds", self.lease_seconds, 0.1, 3600)
        _check_range("result_ttl_seconds", self.result_ttl_seconds, 1, 30 * 86400)
        _check_range("delivery_limit", self.delivery_limit, 1, 1000)
        _check_range("max_queued_requests", self.max_queued_requests, 0, 10**9)
        _check_range("max_queued_requests_per_tenant", self.max_queued_requests_per_tenant, 0, 10**9)
        _check_range("ageing_seconds", self.ageing_seconds, 0, 30 * 86400)
        try:
            parse_weights(self.tenant_weights)
        except ValueError as error:
            raise SettingsError(f"tenant_weights {error}") from None

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        """Read `HEADRACE_REDIS_URL`, `HEADRACE_LEASE_SECONDS` and so on. Unset ones keep their defaults."""
        values: dict[str, str | float | int] = {}
        for setting in fields(cls):
            variable = f"HEADRACE_{setting.name.upper()}"
            if text := environ.get(variable, "").strip():
                values[setting.name] = _parse(variable, text, type(setting.default))
        return cls(**values)  # type: ignore[arg-type]  # _parse gave each its field's own type

    @property
    def weights(self) -> dict[str, float]:
        """The weights of `tenant_weights` by tenant."""
        return parse_weights(self.tenant_weights)

    @property
    def server(self) -> ServerUrl:
        """The parsed URL."""
        return ServerUrl.parse(self.redis_url)

    @property
    def safe_url(self) -> str:
        """The URL without password and options, for logs and error messages."""
        return self.server.safe


def _parse(variable: str, text: str, kind: type) -> str | float | int | bool:
    if kind is bool:
        if text.lower() not in _BOOLEANS:
            raise SettingsError(f"{variable} must be true or false, not {text!r}")
        return _BOOLEANS[text.lower()]
    try:
        return kind(text)
    except ValueError:
        raise SettingsError(f"{variable} must be a number, not {text!r}") from None


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise SettingsError(f"{name} must be between {low:g} and {high:g}, not {value!r}")
