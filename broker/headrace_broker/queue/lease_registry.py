"""`LeaseRegistry`: the leases of this process. They outlive channels, transports and connections."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from headrace_broker.queue.fair_share import FairShare
from headrace_broker.queue.leases import Leases
from headrace_broker.queue.worker_leases import WorkerLeases
from headrace_broker.server.connections import connect
from headrace_broker.server.queue_servers import OTHER_TIMEOUT

_COMMAND_TIMEOUT: Final = 5.0


class LeasingChannel(Protocol):
    """The attributes of the lease transport's channel that the registry uses."""

    master_name: str | None
    lease_seconds: float
    delivery_limit: int
    tenant_weights: Mapping[str, float]
    ageing_seconds: float
    tenant_quota: int
    prefix_affinity: bool
    prefix_grace: float
    usage_days: int
    result_seconds: int
    tenant_order: str
    queue_urls: Mapping[str, str]

    def _connparams(self) -> dict[str, Any]: ...

    def make_pool(self, parameters: dict[str, Any]) -> "redis.ConnectionPool": ...


class LeaseRegistry:
    """The `WorkerLeases` of this process, one for each Redis database of a broker."""

    def __init__(self) -> None:
        self._leases: Final[dict[tuple[Any, ...], WorkerLeases]] = {}
        self._timers: Final[dict[WorkerLeases, Any]] = {}

    def of_channel(self, channel: LeasingChannel) -> WorkerLeases:
        parameters = channel._connparams()
        names = ("host", "port", "path", "db", "username")
        database = (channel.master_name, *(parameters.get(name) for name in names))
        if database not in self._leases:
            parameters |= {"socket_timeout": _COMMAND_TIMEOUT, "protocol": 2, "retry": Retry(NoBackoff(), 0)}
            main = _leases(redis.Redis(connection_pool=channel.make_pool(parameters)), channel)
            urls = set(channel.queue_urls.values())
            by_url = {url: _leases(connect(url, timeout=OTHER_TIMEOUT), channel) for url in urls}
            others = {queue: by_url[url] for queue, url in channel.queue_urls.items()}
            self._leases[database] = WorkerLeases(main, others)
        return self._leases[database]

    def keep_alive(self, leases: WorkerLeases, loop: Any) -> None:
        """Renew the leases now, and from now on by a timer of this event loop."""
        timer = self._timers.pop(leases, None)
        if timer is not None:  # the connection was lost, and this is a new one
            timer.cancel()
            for each in leases.all:
                each.pause_reaping()
        leases.tick()
        self._timers[leases] = loop.call_repeatedly(leases.lease_seconds / 3, leases.tick)


def _leases(client: "redis.Redis", channel: LeasingChannel) -> Leases:
    return Leases(
        client,
        lease_seconds=channel.lease_seconds,
        delivery_limit=channel.delivery_limit,
        fair_share=FairShare(
            channel.tenant_weights,
            channel.ageing_seconds,
            channel.tenant_quota,
            channel.prefix_affinity,
            channel.tenant_order,
            channel.prefix_grace,
        ),
        usage_days=channel.usage_days,
        result_seconds=channel.result_seconds,
    )
