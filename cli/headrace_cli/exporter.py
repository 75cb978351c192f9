"""`Exporter`: metrics of the service's queues and its Redis, even while no worker runs.

The exporter is a process of its own without an engine. It polls Redis at its own interval, so a scrape makes no call
to Redis, and a slow Redis delays no scrape.
"""

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Self

import redis

from headrace_broker.keys import queue_name
from headrace_broker.models.registry import RegisteredModel, known_models
from headrace_broker.queue.deadlines import read_earliest_slack
from headrace_broker.queue.levels import QueueLevelReader, QueueLevels
from headrace_broker.queue.outstanding_tokens import read_outstanding_tokens
from headrace_broker.queue.unread_lists import UnreadListSearch, lists_on_main, remedy, separated_lists
from headrace_broker.server.connections import REDIS_ERRORS, address_of
from headrace_broker.server.eviction import eviction_warning
from headrace_broker.server.persistence import persistence_is_ok
from headrace_broker.server.queue_servers import QueueServers
from headrace_broker.server.restart_safety import restart_safety
from headrace_broker.server.stream_servers import StreamServers
from headrace_broker.usage.ledger import UsageCounts
from headrace_cli.stream_server_sampler import StreamServerSampler
from headrace_cli.usage_sampler import UsageSampler
from headrace_monitoring.health import HealthServer
from headrace_monitoring.redis_levels import RedisLevels
from headrace_monitoring.service_levels import ModelLevels, ServiceExposition, ServiceLevels
from headrace_wire import environment
from headrace_wire.option import option, options_of, problems_of
from headrace_workers.errors import WorkerSettingsError

logger = logging.getLogger(__name__)

MAX_MODELS = 100
"""The most models with metrics, because each adds a set of series."""
EXPORTER_PREFIX = "HEADRACE_EXPORTER"
"""Prefix of the environment variables."""
_STUCK_AFTER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ExporterSettings:
    """Where the exporter listens, and how often it polls."""

    host: str = option("127.0.0.1", "Address to listen on.", metavar="HOST")
    port: int = option(9465, "Port to listen on; 0 takes a free one.", metavar="PORT", least=0, most=65535)
    interval: float = option(2.0, "Pause between two polls of Redis.", metavar="S", least=0.1, most=60)

    @classmethod
    def from_env(cls, environ: Mapping[str, str], **given: Any) -> Self:
        """Read the variables `HEADRACE_EXPORTER_*`. A given value wins. Raises WorkerSettingsError."""
        values, problems = environment.read(options_of(cls), environ, EXPORTER_PREFIX)
        settings = cls(**{**values, **given})
        problems += problems_of(settings)
        if problems:
            raise WorkerSettingsError("; ".join(problems))
        return settings


class Exporter:
    """Poll Redis and serve metrics until it is stopped.

    Args:
        client: the Redis of the registered models; its user needs only read access.
        models: served names to export before a worker has registered them.
        interval_seconds: pause between two polls.
        servers: the servers of the queues; without them, all queues are in `client`.
        streams: the servers of the streams; without them, all streams are in `client`.
    """

    def __init__(
        self,
        client: "redis.Redis",
        *,
        models: Sequence[str] = (),
        interval_seconds: float = 2.0,
        host: str = "127.0.0.1",
        port: int = 9465,
        servers: QueueServers | None = None,
        streams: StreamServers | None = None,
    ) -> None:
        self._client = client
        self._streams = StreamServers(client, {}, 0) if streams is None else streams
        self._stream_servers = StreamServerSampler(self._streams)
        self._servers = QueueServers(client, {}) if servers is None else servers
        self._usage = UsageSampler()
        self._models = tuple(models)
        self._interval = interval_seconds
        self._reader = QueueLevelReader(self._servers.of)
        self._searches = {server: UnreadListSearch(server) for server in self._servers}
        """Without those of servers where the Redis user may not search. With the users of deploy/redis, no producer can
        write such lists."""
        self._away: set[redis.Redis] = set()
        """The servers that could not be read."""
        self._problem: str | None = "Redis has not been read yet"
        """Why the main server could not be read; None if it could."""
        self._warned: dict[redis.Redis, set[str]] = {}
        self._warned_lists: set[str] = set()
        self._restarts = {server: RestartComparison() for server in self._servers}
        self._polled_at: float | None = None
        self._stopped = threading.Event()
        self.exposition = ServiceExposition(version=version("headrace"), main=address_of(client))
        self.server = HealthServer(
            exposition=self.exposition.exposition,
            not_ready=lambda: self._problem,
            not_alive=self._not_alive,
            host=host,
            port=port,
        )

    def run(self) -> None:
        """Serve and poll until `stop`. Raises HealthAddressError if the address is not available."""
        with self.server:
            logger.info("metrics on %s/metrics", self.server.url)
            self.keep_polling()

    def keep_polling(self) -> None:
        """Poll until `stop`. The caller starts `server`."""
        while not self._stopped.is_set():
            self.poll()
            self._stopped.wait(self._interval)

    def stop(self) -> None:
        """Stop polling. Safe to call from a signal handler or another thread."""
        self._stopped.set()

    def poll(self) -> None:
        """Read all servers once. The metrics show which did not answer."""
        started = time.perf_counter()
        try:
            levels = self._read()
        except REDIS_ERRORS as error:
            if self._problem is None or self._polled_at is None:  # once per outage, not at each of its polls
                logger.warning("Redis became unavailable: %s", error)
            self._problem = f"Redis could not be read: {error}"
            self.exposition.failed()
        else:
            if self._problem is not None:
                logger.info("Redis became available: models=%d", len(levels.models))
            self._problem = None
            self.exposition.polled(levels, time.perf_counter() - started)
        self._polled_at = time.monotonic()

    def _read(self) -> ServiceLevels:
        registered = known_models(self._client)
        newest_first = sorted(registered.values(), key=lambda model: model.seen, reverse=True)
        names = list(dict.fromkeys([*self._models, *(model.name for model in newest_first)]))
        shown = sorted(names[:MAX_MODELS])
        queues = dict(self._servers.by_server(queue_name(name) for name in shown))
        by_name = {queue_name(name): (name, registered.get(name)) for name in shown}
        models: dict[str, ModelLevels] = {}
        servers: dict[str, RedisLevels] = {}
        for server in self._servers:
            own = {queue: by_name[queue] for queue in queues.get(server, ())}
            try:
                levels = self._queue_levels(server, own)
                servers[address_of(server)] = self._redis_levels(server, list(levels.values()))
            except REDIS_ERRORS as error:
                if server is self._client:
                    raise
                if server not in self._away:  # once per outage
                    logger.warning(
                        "%s, with the queues %s, cannot be read: %s", address_of(server), ", ".join(own), error
                    )
                self._away.add(server)
            else:
                self._away.discard(server)
                models |= levels
        stream_servers = list(self._stream_servers.read())
        for name in [each.name for each in stream_servers if each.up]:
            with suppress(*REDIS_ERRORS):  # then it is not up at the next poll
                for address, server in self._streams.nodes(name).items():
                    servers.setdefault(address, self._redis_levels(server, ()))
        return ServiceLevels(
            models=[models[queue] for queue in by_name if queue in models],
            servers=list(servers.values()),
            away={address_of(server) for server in self._away},
            models_left_out=len(names) - len(shown),
            stream_servers=stream_servers,
        )

    def _redis_levels(self, server: "redis.Redis", models: Sequence[ModelLevels]) -> RedisLevels:
        info = server.info()
        eviction, safety = eviction_warning(info), restart_safety(server, info)
        warnings = {*safety.warnings, *([eviction] if eviction else [])}
        for warning in warnings - self._warned.get(server, set()):  # at the start, and after a change of settings
            logger.warning("%s: %s", address_of(server), warning)
        self._warned[server] = warnings
        restarts = self._restarts.setdefault(server, RestartComparison())
        restarts.compare(info["run_id"], models)
        return RedisLevels(
            server=address_of(server),
            memory_used_bytes=info["used_memory"],
            memory_limit_bytes=info.get("maxmemory", 0),
            connected_clients=info["connected_clients"],
            persistence_ok=persistence_is_ok(info),
            may_evict=eviction is not None,
            started_at=time.time() - info["uptime_in_seconds"],
            loads_all=safety.loads_all,
            load_errors=safety.load_errors,
            messages_before_restart=restarts.before,
            messages_after_restart=restarts.after,
            evicted_keys=info["evicted_keys"],
            rejected_connections=info["rejected_connections"],
        )

    def _queue_levels(
        self, server: "redis.Redis", queues: Mapping[str, tuple[str, RegisteredModel | None]]
    ) -> dict[str, ModelLevels]:
        """Return the levels of these queues of the server. `queues` are their models."""
        unread, usage = self._unread_messages(server, queues), self._usage.read(server)
        return {
            queue: _levels_of(
                server,
                queues[queue][0],
                queue,
                found,
                unread[queue],
                queues[queue][1],
                usage.get(queues[queue][0], UsageCounts()),
            )
            for queue, found in self._reader.read(queues).items()
        }

    def _unread_messages(self, server: "redis.Redis", queues: Collection[str]) -> dict[str, int]:
        """Return the number of messages by queue in lists that no worker reads, and log each such list once."""
        separated = separated_lists(server, queues)
        try:
            if server in self._searches:
                self._searches[server].step(queues)
        except redis.exceptions.NoPermissionError:
            del self._searches[server]
        counts = {}
        for queue in queues:
            lists = {name: length for name, length in separated.items() if name.startswith(f"{queue}:")}
            lists |= self._searches[server].lengths(queue) if server in self._searches else {}
            on_main = {} if server is self._client else lists_on_main(self._client, queue)
            for name in (lists.keys() | on_main.keys()) - self._warned_lists:
                logger.warning("no worker reads the list %r: %s", name, remedy(queue, name))
            self._warned_lists |= lists.keys() | on_main.keys()
            counts[queue] = sum(lists.values()) + sum(on_main.values())
        return counts

    def _not_alive(self) -> str | None:
        silent = 0.0 if self._polled_at is None else time.monotonic() - self._polled_at
        return f"no poll for {silent:.0f} s" if silent > self._interval + _STUCK_AFTER_SECONDS else None


def _levels_of(
    server: "redis.Redis",
    model: str,
    queue: str,
    found: QueueLevels,
    unread: int,
    registered: RegisteredModel | None,
    used: UsageCounts,
) -> ModelLevels:
    return ModelLevels(
        model=model,
        queue=queue,
        ready=found.ready,
        leased=found.leased,
        run_out=found.run_out,
        dead=found.dead,
        oldest_age_seconds=found.oldest_age_seconds,
        unread=unread,
        blocked=found.problem is not None,
        last_seen=None if registered is None else registered.seen,
        used_requests=used.requests,
        used_tokens={
            "prompt": used.prompt_tokens,
            "cached": used.cached_tokens,
            "generated": used.completion_tokens,
        },
        outstanding_tokens=read_outstanding_tokens(server, queue),
        tokens_per_second=None if registered is None else registered.tokens_per_second,
        earliest_slack_seconds=read_earliest_slack(server, queue),
    )


class RestartComparison:
    """Compares the messages of the last poll before a restart or failover of Redis with those of the next poll.

    Messages that workers had before it are left out, because workers may complete them while Redis is away.
    """

    def __init__(self) -> None:
        self.before = 0
        """Ready messages before the last restart that was seen."""
        self.after = 0
        """Ready and leased messages after it: some may have been leased since."""
        self._run_id: str | None = None
        self._ready = 0

    def compare(self, run_id: str, models: Sequence[ModelLevels]) -> None:
        """Record one poll. `run_id` identifies the process of the server: INFO has it."""
        ready = sum(sum(model.ready.values()) for model in models)
        if self._run_id not in (None, run_id):
            self.before, self.after = self._ready, ready + sum(model.leased for model in models)
        self._run_id, self._ready = run_id, ready
