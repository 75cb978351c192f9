"""The settings of the queue that producers, subscribers and workers share. Engine settings are elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from headrace_broker.errors import SettingsError
from headrace_broker.queue.fair_share import ARRIVAL, ORDERS, parse_weights
from headrace_broker.server.url import ServerUrl
from headrace_wire import environment
from headrace_wire.option import option, options_of, problems_of

DEFAULT_REDIS_URL: Final = "redis://127.0.0.1:6379/0"
_MONTH: Final = 30 * 86400
_MOST_REQUESTS: Final = 10**9


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """Address, lifetimes and limits of the queue. All times are in seconds."""

    redis_url: str = option(
        DEFAULT_REDIS_URL,
        "The service's Redis: redis://, rediss://, unix:// or sentinel://.",
        metavar="URL",
        repr=False,
    )
    lease_seconds: float = option(
        15.0,
        "A worker that does not renew its leases for this long loses its messages to other workers.",
        metavar="S",
        least=0.1,
        most=3600,
    )
    result_ttl_seconds: int = option(
        600,
        "How long a stream lives after its last entry, and a result after it was stored.",
        metavar="S",
        least=1,
        most=_MONTH,
    )
    delivery_limit: int = option(
        5,
        "How often a message is delivered to workers before it becomes a dead letter.",
        metavar="N",
        least=1,
        most=1000,
    )
    max_queued_requests: int = option(
        0,
        "Clients refuse to submit to a queue that holds this many requests; 0: no limit.",
        metavar="N",
        least=0,
        most=_MOST_REQUESTS,
    )
    max_queued_requests_per_tenant: int = option(
        0,
        "The same limit for each tenant in a queue. Workers refuse requests above it from producers that do not check.",
        metavar="N",
        least=0,
        most=_MOST_REQUESTS,
    )
    ageing_seconds: float = option(
        120.0,
        "A request gains one priority step (9, 6, 3, 0) each time it has waited this long; 0: never.",
        metavar="S",
        least=0,
        most=_MONTH,
    )
    prefix_affinity: bool = option(
        False, "Among the next tenant's requests, a worker prefers a prompt that begins like one that it ran recently."
    )
    prefix_grace: float = option(
        0.05,
        "With --prefix-affinity: how long the next request of a conversation waits for the worker that took the last "
        "one, if that worker has a free slot; 0: not at all.",
        metavar="S",
        least=0,
        most=1,
    )
    order: str = option(
        ARRIVAL,
        "Order of a tenant's requests: arrival takes them as they came; deadline takes the one that expires first, and "
        "those without expires last.",
        choices=ORDERS,
    )
    tenant_weights: str = option(
        "",
        "Shares of a queue, in tokens, for some tenants, such as acme=4,beta=0.5; other tenants have 1.",
        metavar="A=4,B=2",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "redis_url", ServerUrl.parse(self.redis_url).text)
        problems = problems_of(self)
        if self.order not in ORDERS:
            problems.append(f"order must be {' or '.join(ORDERS)}, got {self.order!r}")
        try:
            parse_weights(self.tenant_weights)
        except ValueError as error:
            problems.append(f"tenant_weights {error}")
        if problems:
            raise SettingsError("; ".join(problems))

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        """Read `HEADRACE_REDIS_URL` and so on. Unset ones keep their defaults. Raises SettingsError."""
        values, problems = environment.read(options_of(cls), environ)
        if problems:
            raise SettingsError("; ".join(problems))
        return cls(**values)

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
