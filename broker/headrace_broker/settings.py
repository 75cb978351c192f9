"""The settings of the queue that producers, subscribers and workers share. Engine settings are elsewhere."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Self

from headrace_broker.errors import SettingsError
from headrace_broker.keys import queue_name
from headrace_broker.queue.fair_share import ARRIVAL, ORDERS, parse_weights
from headrace_broker.server.stream_table import MAX_SERVERS, stream_server_problems
from headrace_broker.server.url import ServerUrl
from headrace_wire import environment
from headrace_wire.option import option, options_of, problems_of
from headrace_wire.request import name_problems
from headrace_wire.values import shown

DEFAULT_REDIS_URL: Final = "redis://127.0.0.1:6379/0"
_MONTH: Final = 30 * 86400
_MOST_REQUESTS: Final = 10**9
_NEXT_PAIR: Final = re.compile(r",(?=[^,=]+=[^,=/]*://)")  # the URL of Sentinels has commas, too


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
    usage_days: int = option(
        400,
        "How long the tokens that were used are known for each day; 0: they are not counted.",
        metavar="N",
        least=0,
        most=3660,
    )
    queue_urls: str = option(
        "",
        "Servers of some models' queues, such as chat=redis://a:6379/0,code=redis://b:6379/0. Other queues, and all "
        "streams and results, are on the server of --redis-url.",
        metavar="MODEL=URL,...",
        repr=False,
    )

    stream_urls: str = option(
        "",
        "Stream servers, such as s1=redis://a:6379/0,s2=redis+cluster://b:6379. The table that `headrace streams` "
        "writes decides on which of them new streams are placed. Empty: all streams are on the server of --redis-url.",
        metavar="NAME=URL,...",
        repr=False,
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
        for parse, text in ((parse_queue_urls, self.queue_urls), (parse_stream_urls, self.stream_urls)):
            try:
                parse(text)
            except SettingsError as error:
                problems.append(str(error))
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
    def url_by_queue(self) -> dict[str, str]:
        """The URLs of `queue_urls` by queue, without those that are `redis_url`."""
        urls = {queue_name(model): url for model, url in parse_queue_urls(self.queue_urls).items()}
        return {queue: url for queue, url in urls.items() if url != self.redis_url}

    @property
    def stream_servers(self) -> tuple[dict[str, str], int]:
        """The arguments of `StreamServers.connected`: the URLs by name, and the life of a stream in seconds."""
        return self.stream_url_by_name, self.result_ttl_seconds

    @property
    def stream_url_by_name(self) -> dict[str, str]:
        """The URLs of `stream_urls` by name."""
        return parse_stream_urls(self.stream_urls)

    @property
    def server(self) -> ServerUrl:
        """The parsed URL."""
        return ServerUrl.parse(self.redis_url)

    @property
    def safe_url(self) -> str:
        """The URL without password and options, for logs and error messages."""
        return self.server.safe


def parse_queue_urls(text: str) -> dict[str, str]:
    """Parse a text such as `chat=redis://a:6379/0,code=redis://b:6379/0` into normalised URLs by model.

    Raises SettingsError with the model, the value and the rule. It shows no password.
    """
    return _parse_urls("queue_urls", "model", text, name_problems)


def parse_stream_urls(text: str) -> dict[str, str]:
    """Parse a text such as `s1=redis://a:6379/0,s2=redis://b:6379/0` into normalised URLs by name.

    Raises SettingsError with the name, the value and the rule. It shows no password.
    """
    urls = _parse_urls("stream_urls", "name", text, stream_server_problems)
    if len(urls) > MAX_SERVERS:
        raise SettingsError(f"stream_urls must name at most {MAX_SERVERS} servers, got {len(urls)}")
    return urls


def _parse_urls(setting: str, key: str, text: str, problems_of_name: Callable[[str, str], list[str]]) -> dict[str, str]:
    urls: dict[str, str] = {}
    for pair in _NEXT_PAIR.split(text) if text else ():
        name, separator, url = (part.strip() for part in pair.partition("="))
        if not separator:
            shown = name if "://" not in name else f"{name.partition('://')[0]}://..."  # it may hold a password
            raise SettingsError(f"{setting} must be {key}=url pairs separated by commas, got {shown!r}")
        if problems := problems_of_name(f"a {key} of {setting}", name):
            raise SettingsError("; ".join(problems))
        if name in urls:
            raise SettingsError(
                f"{setting} must name each {'model' if key == 'model' else 'server'} once, got {name!r} twice"
            )
        try:
            urls[name] = ServerUrl.parse(url, may_be_cluster=setting == "stream_urls").text
        except SettingsError as error:
            raise SettingsError(str(error).replace("redis_url", f"the URL of {name!r} in {setting}", 1)) from None
    return urls


def as_settings(broker: str | BrokerSettings | None) -> BrokerSettings:
    """Return a client's `broker` argument as settings. Raises SettingsError."""
    if broker is None:
        return BrokerSettings.from_env(os.environ)
    if isinstance(broker, str):
        return BrokerSettings(redis_url=broker)
    if not isinstance(broker, BrokerSettings):
        raise SettingsError(f"broker must be a Redis URL or BrokerSettings, got {shown(broker)}")
    return broker
