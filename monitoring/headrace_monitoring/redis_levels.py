"""The metrics of the Redis servers, and of those that have streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric

from headrace_monitoring.sampled_families import Samples, counter, gauge


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisLevels:
    """The state of a Redis server. Sizes are bytes. A limit of 0 means no limit."""

    server: str
    """Its address, without user and password."""
    memory_used_bytes: int
    memory_limit_bytes: int
    connected_clients: int
    persistence_ok: bool
    """The last write of the append-only file and the last snapshot succeeded."""
    may_evict: bool
    """The eviction policy is not noeviction."""
    evicted_keys: int
    rejected_connections: int
    started_at: float
    """Unix time of the server's start."""
    loads_all: bool | None
    """The next restart loads the whole append-only file; None: the exporter has no right to read the setting."""
    load_errors: int
    """Commands of the append-only file that the server refused at its last start."""
    messages_before_restart: int
    messages_after_restart: int


def redis_families(servers: Sequence[RedisLevels]) -> Iterator[Metric]:
    """Return the metrics of these servers. Each has the label `server`."""

    def each(read: Callable[[RedisLevels], float | None]) -> Samples:
        found = ((server.server, read(server)) for server in servers)
        return [({"server": server}, value) for server, value in found if value is not None]

    yield gauge("redis_memory_used_bytes", "Memory that Redis uses.", each(lambda redis: redis.memory_used_bytes))
    yield gauge(
        "redis_memory_limit_bytes", "Redis's maxmemory; 0: no limit.", each(lambda redis: redis.memory_limit_bytes)
    )
    yield gauge("redis_connected_clients", "Connections to Redis.", each(lambda redis: redis.connected_clients))
    yield gauge(
        "redis_persistence_ok",
        "1 while the last write of the append-only file and the last snapshot succeeded.",
        each(lambda redis: redis.persistence_ok),
    )
    yield gauge(
        "redis_may_evict",
        "1 while Redis may evict keys: its maxmemory-policy is not noeviction.",
        each(lambda redis: redis.may_evict),
    )
    yield gauge("redis_start_timestamp_seconds", "Unix time of Redis's start.", each(lambda redis: redis.started_at))
    yield gauge(
        "redis_loads_all",
        "1: a restart of Redis loads its whole append-only file. 0: it would skip transactions. Absent: the exporter"
        " has no right to read the setting.",
        each(lambda redis: redis.loads_all),
    )
    yield gauge(
        "redis_load_errors",
        "Commands that Redis refused while it loaded its append-only file at its last start.",
        each(lambda redis: redis.load_errors),
    )
    yield gauge(
        "redis_messages_before_restart",
        "Ready messages at the last poll before Redis restarted; 0: the exporter saw no restart.",
        each(lambda redis: redis.messages_before_restart),
    )
    yield gauge(
        "redis_messages_after_restart",
        "Ready and leased messages at the first poll after Redis restarted.",
        each(lambda redis: redis.messages_after_restart),
    )
    yield counter("redis_evicted_keys", "Keys that Redis evicted.", each(lambda redis: redis.evicted_keys))
    yield counter(
        "redis_rejected_connections", "Connections that Redis refused.", each(lambda redis: redis.rejected_connections)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamServerLevels:
    """The state of one server of the table of stream servers."""

    name: str
    up: bool
    """It answers, and is the server that the table names."""
    streams: int | None
    """Keys besides the server's id: at least its streams; None if it is not up."""
    draining: bool
    """No new streams are placed on it."""


def stream_server_families(servers: Sequence[StreamServerLevels]) -> Iterator[Metric]:
    """Return the metrics of these servers. Each has the label `stream_server`."""
    of = [({"stream_server": server.name}, server) for server in servers]
    yield gauge(
        "stream_server_up",
        "1 while the exporter reaches the stream server, and it is the one that the table names.",
        [(labels, server.up) for labels, server in of],
    )
    yield gauge(
        "stream_server_streams",
        "Keys of streams on the stream server; a stream that has ended has two. Absent: the server is not up.",
        [(labels, server.streams) for labels, server in of if server.streams is not None],
    )
    yield gauge(
        "stream_server_draining",
        "1 while no new streams are placed on the stream server.",
        [(labels, server.draining) for labels, server in of],
    )
