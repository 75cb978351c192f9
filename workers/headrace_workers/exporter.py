"""`Exporter`: metrics of the service's queues and its Redis, even while no worker runs.

The exporter is a process of its own without an engine. It polls Redis at its own interval, so a scrape makes no call
to Redis, and a slow Redis delays no scrape.
"""

import logging
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version

import redis

from headrace_broker.connections import REDIS_ERRORS
from headrace_broker.eviction import eviction_warning
from headrace_broker.keys import queue_name
from headrace_broker.queue_levels import QueueLevelReader
from headrace_broker.reasons import DEAD_LETTER_LABELS
from headrace_broker.registry import RegisteredModel, known_models
from headrace_monitoring.health import HealthServer
from headrace_monitoring.labels import LabelSets
from headrace_monitoring.service_levels import ModelLevels, RedisLevels, ServiceExposition, ServiceLevels

logger = logging.getLogger(__name__)

MAX_MODELS = 100
"""The most models with metrics, because each adds a set of series."""
_STUCK_AFTER_SECONDS = 60.0


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
        self._up = False
        self._warned: str | None = None
        self._polled_at: float | None = None
        self._stopped = threading.Event()
        sets = LabelSets(dead_letter_reasons=DEAD_LETTER_LABELS)
        self.exposition = ServiceExposition(version=version("headrace"), label_sets=sets)
        self.server = HealthServer(
            exposition=self.exposition.exposition,
            not_ready=lambda: None if self._up else "Redis does not answer",
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
            if self._up or self._polled_at is None:  # once per outage, not at each of its polls
                logger.warning("Redis became unavailable: %s", error)
            self._up = False
            self.exposition.failed()
        else:
            if not self._up:
                logger.info("Redis became available: models=%d", len(levels.models))
            self._up = True
            self.exposition.polled(levels, time.perf_counter() - started)
        self._polled_at = time.monotonic()

    def _read(self) -> ServiceLevels:
        registered = known_models(self._client)
        newest_first = sorted(registered.values(), key=lambda model: model.seen, reverse=True)
        names = list(dict.fromkeys([*self._models, *(model.name for model in newest_first)]))
        shown = sorted(names[:MAX_MODELS])
        return ServiceLevels(
            models=self._model_levels(shown, registered),
            redis=self._redis_levels(),
            models_left_out=len(names) - len(shown),
        )

    def _redis_levels(self) -> RedisLevels:
        info = self._client.info()
        warning = eviction_warning(info)
        if warning is not None and warning != self._warned:  # at the start, and after a change of the configuration
            logger.warning("%s", warning)
        self._warned = warning
        return RedisLevels(
            memory_used_bytes=info["used_memory"],
            memory_limit_bytes=info.get("maxmemory", 0),
            connected_clients=info["connected_clients"],
            persistence_ok={info.get("aof_last_write_status"), info.get("rdb_last_bgsave_status")} <= {"ok", None},
            may_evict=warning is not None,
            evicted_keys=info["evicted_keys"],
            rejected_connections=info["rejected_connections"],
        )

    def _model_levels(self, names: Sequence[str], registered: dict[str, RegisteredModel]) -> list[ModelLevels]:
        levels = self._reader.read(queue_name(name) for name in names)
        return [
            ModelLevels(
                model=name,
                queue=queue_name(name),
                ready=queue.ready,
                leased=queue.leased,
                run_out=queue.run_out,
                dead=queue.dead,
                oldest_age_seconds=queue.oldest_age_seconds,
                blocked=queue.problem is not None,
                last_seen=registered[name].seen if name in registered else None,
            )
            for name, queue in zip(names, levels.values(), strict=True)
        ]

    def _not_alive(self) -> str | None:
        silent = 0.0 if self._polled_at is None else time.monotonic() - self._polled_at
        return f"no poll for {silent:.0f} s" if silent > self._interval + _STUCK_AFTER_SECONDS else None
