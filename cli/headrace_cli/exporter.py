"""`Exporter`: metrics of the service's queues and its Redis, even while no worker runs.

The exporter is a process of its own without an engine. It polls Redis at its own interval, so a scrape makes no call
to Redis, and a slow Redis delays no scrape.
"""

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Self

import redis

from headrace_broker.keys import queue_name
from headrace_broker.models.registry import RegisteredModel, known_models
from headrace_broker.queue.deadlines import read_earliest_slack
from headrace_broker.queue.levels import QueueLevelReader
from headrace_broker.queue.outstanding_tokens import read_outstanding_tokens
from headrace_broker.queue.unread_lists import UnreadListSearch, separated_lists
from headrace_broker.server.connections import REDIS_ERRORS
from headrace_broker.server.eviction import eviction_warning
from headrace_broker.server.restart_safety import restart_safety
from headrace_monitoring.health import HealthServer
from headrace_monitoring.service_levels import ModelLevels, RedisLevels, ServiceExposition, ServiceLevels
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
        client: Redis; its user needs only read access.
        models: served names to export before a worker has registered them.
        interval_seconds: pause between two polls.
    """

    def __init__(
        self,
        client: "redis.Redis",
        *,
        models: Sequence[str] = (),
        interval_seconds: float = 2.0,
        host: str = "127.0.0.1",
        port: int = 9465,
    ) -> None:
        self._client = client
        self._models = tuple(models)
        self._interval = interval_seconds
        self._reader = QueueLevelReader(client)
        self._search: UnreadListSearch | None = UnreadListSearch(client)
        """None if the Redis user may not search. With the users of deploy/redis, no producer can write such lists."""
        self._problem: str | None = "Redis has not been read yet"
        """Why Redis could not be read; None if it could."""
        self._warned: set[str] = set()
        self._warned_lists: set[str] = set()
        self._restarts = RestartComparison()
        self._polled_at: float | None = None
        self._stopped = threading.Event()
        self.exposition = ServiceExposition(version=version("headrace"))
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
        """Read Redis once. If it does not answer, the metrics say so."""
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
        models = self._model_levels(shown, registered)
        return ServiceLevels(
            models=models,
            redis=self._redis_levels(models),
            models_left_out=len(names) - len(shown),
        )

    def _redis_levels(self, models: Sequence[ModelLevels]) -> RedisLevels:
        info = self._client.info()
        eviction, safety = eviction_warning(info), restart_safety(self._client, info)
        warnings = {*safety.warnings, *([eviction] if eviction else [])}
        for warning in warnings - self._warned:  # at the start, and after a change of the configuration
            logger.warning("%s", warning)
        self._warned = warnings
        self._restarts.compare(info["run_id"], models)
        return RedisLevels(
            memory_used_bytes=info["used_memory"],
            memory_limit_bytes=info.get("maxmemory", 0),
            connected_clients=info["connected_clients"],
            persistence_ok={info.get("aof_last_write_status"), info.get("rdb_last_bgsave_status")} <= {"ok", None},
            may_evict=eviction is not None,
            started_at=time.time() - info["uptime_in_seconds"],
            loads_all=safety.loads_all,
            load_errors=safety.load_errors,
            messages_before_restart=self._restarts.before,
            messages_after_restart=self._restarts.after,
            evicted_keys=info["evicted_keys"],
            rejected_connections=info["rejected_connections"],
        )

    def _model_levels(self, names: Sequence[str], registered: dict[str, RegisteredModel]) -> list[ModelLevels]:
        levels = self._reader.read(queue_name(name) for name in names)
        unread = self._unread_messages(levels)
        return [
            ModelLevels(
                model=name,
                queue=queue_name(name),
                ready=queue.ready,
                leased=queue.leased,
                run_out=queue.run_out,
                dead=queue.dead,
                oldest_age_seconds=queue.oldest_age_seconds,
                unread=unread[queue_name(name)],
                blocked=queue.problem is not None,
                last_seen=registered[name].seen if name in registered else None,
                outstanding_tokens=read_outstanding_tokens(self._client, queue_name(name)),
                tokens_per_second=registered[name].tokens_per_second if name in registered else None,
                earliest_slack_seconds=read_earliest_slack(self._client, queue_name(name)),
            )
            for name, queue in zip(names, levels.values(), strict=True)
        ]

    def _unread_messages(self, queues: Collection[str]) -> dict[str, int]:
        """Return the number of messages by queue in lists that no worker reads, and log each such list once."""
        separated = separated_lists(self._client, queues)
        if self._search is not None:
            try:
                self._search.step(queues)
            except redis.exceptions.NoPermissionError:
                self._search = None
        counts = {}
        for queue in queues:
            lists = {name: length for name, length in separated.items() if name.startswith(f"{queue}:")}
            lists |= {} if self._search is None else self._search.lengths(queue)
            for name in lists.keys() - self._warned_lists:
                logger.warning(
                    "no worker reads the list %r: leave sep and global_keyprefix of its producers unset", name
                )
            self._warned_lists |= lists.keys()
            counts[queue] = sum(lists.values())
        return counts

    def _not_alive(self) -> str | None:
        silent = 0.0 if self._polled_at is None else time.monotonic() - self._polled_at
        return f"no poll for {silent:.0f} s" if silent > self._interval + _STUCK_AFTER_SECONDS else None


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
