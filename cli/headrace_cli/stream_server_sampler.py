"""`StreamServerSampler`: the exporter's view of the stream servers."""

import logging
from collections.abc import Iterator
from typing import Final

import redis

from headrace_broker.errors import SettingsError
from headrace_broker.server.connections import REDIS_ERRORS
from headrace_broker.server.stream_servers import StreamServers
from headrace_monitoring.redis_levels import StreamServerLevels

logger = logging.getLogger(__name__)

STREAM_SERVER_TIMEOUT: Final = 1.0
"""Seconds that a poll waits for a stream server."""


class StreamServerSampler:
    """Redis's errors of the main server pass through; a stream server that does not answer is not up."""

    def __init__(self, servers: StreamServers) -> None:
        self._servers: Final = servers
        self._reported: Final[dict[str, str]] = {}

    def read(self) -> Iterator[StreamServerLevels]:
        """Describe each server of the table."""
        for name, row in self._servers.refresh().rows.items():
            if row.is_lost:
                continue
            keys = self._num_keys(name)
            streams = None if keys is None else max(0, keys - 1)  # its id is no stream
            yield StreamServerLevels(name=name, up=keys is not None, streams=streams, draining=row.until is not None)

    def _num_keys(self, name: str) -> int | None:
        """Return the number of keys on a server; None if it is not usable."""
        try:
            self._servers.of(name)
            num_keys = sum(map(_num_keys_of, self._servers.nodes(name).values()))
        except (SettingsError, *REDIS_ERRORS) as error:
            if name not in self._reported:  # once per outage
                logger.warning("stream server %s is not usable: %s", name, error)
            self._reported[name] = str(error)
            self._servers.check_again(name)
            return None
        self._reported.pop(name, None)
        return num_keys


def _num_keys_of(client: "redis.Redis") -> int:
    database = client.connection_pool.connection_kwargs.get("db") or 0
    return int(client.info("keyspace").get(f"db{database}", {}).get("keys", 0))
