"""`Servers`: clients of every Redis server of the service."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import redis

from headrace_broker.errors import SettingsError
from headrace_broker.server.connections import connect
from headrace_broker.server.queue_servers import QueueServers
from headrace_broker.server.stream_servers import StreamServers
from headrace_broker.settings import BrokerSettings


@dataclass(frozen=True, slots=True)
class Servers:
    """Each server once."""

    main: "redis.Redis"
    all: "tuple[redis.Redis, ...]"

    @classmethod
    @contextmanager
    def connected(cls, settings: BrokerSettings) -> Iterator[Self]:
        """Connect to the servers of HEADRACE_REDIS_URL, HEADRACE_QUEUE_URLS and HEADRACE_STREAM_URLS.

        Raises SettingsError if a stream server of the table has no URL, or is a Redis Cluster: its streams would stay.
        """
        with (
            connect(settings.redis_url) as main,
            QueueServers(main, settings.url_by_queue) as queues,
            StreamServers.connected(main, *settings.stream_servers) as streams,
        ):
            table = streams.refresh()
            for name in streams.without_url():
                raise SettingsError(streams.missing_url(name))
            for name, row in table.rows.items():
                if len(streams.homes_of(name)) > 1:
                    raise SettingsError(
                        f"the stream server {name} is a Redis Cluster, which headrace erase cannot search: drain it by"
                        f" headrace streams drain {name}, and erase the tenant when its streams have expired and it is"
                        " forgotten"
                    )
                if not row.is_lost:
                    streams.of(name)
            yield cls(main, tuple(dict.fromkeys([*queues, *streams])))
