"""What the exporter shows: the queues and their Redis, whether or not any worker lives.

The names of the queue's families are those that a worker shows for its own queue, so that one panel serves both. Who
reads Redis is not here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace_monitoring.exposition import ExpositionFormat, render
from headrace_monitoring.families import PREFIX
from headrace_monitoring.labels import OTHER, LabelSets


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLevels:
    """One model's queue at one moment. Messages, seconds."""

    model: str
    queue: str
    ready: Mapping[int, int]
    """By priority step."""
    leased: int
    run_out: int
    """Expired leases that no worker has reaped."""
    dead: Mapping[str, int]
    """By reason, in the broker's own words."""
    oldest_age_seconds: float | None
    blocked: bool
    """A key of the queue has the wrong type, so that no worker is given messages."""
    last_seen: float | None
    """Unix time at which a worker last said that it serves the model; None if none ever did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisLevels:
    """The server. Bytes; a limit of 0 is none."""

    memory_used_bytes: int
    memory_limit_bytes: int
    connected_clients: int
    persistence_ok: bool
    """The last write of the append-only file and the last snapshot went well."""
    may_evict: bool
    """The policy allows to drop keys to make room."""
    evicted_keys: int
    rejected_connections: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevels:
    """One poll of the service."""

    models: Sequence[ModelLevels]
    redis: RedisLevels
    models_left_out: int = field(default=0)
    """Registered models beyond the most that are shown."""


class ServiceExposition(Collector):
    """The newest poll as metrics. A scrape reads nothing but memory.

    While Redis is away the queues' levels are absent: the last ones would be a lie, and zero another.

    Args:
        version: of Headrace.
        label_sets: the reasons that get a series of their own.
        clock: unix time in seconds.
    """

    def __init__(
        self, *, version: str, label_sets: LabelSets | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._version = version
        self._sets = LabelSets() if label_sets is None else label_sets
        self._clock = clock
        self._levels: ServiceLevels | None = None
        self._polled_at = clock()
        self._poll_seconds = 0.0
        self._failures = 0
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def polled(self, levels: ServiceLevels, seconds: float) -> None:
        """Redis answered within `seconds`."""
        self._levels, self._polled_at, self._poll_seconds = levels, self._clock(), seconds

    def failed(self) -> None:
        """Redis did not answer."""
        self._levels, self._polled_at = None, self._clock()
        self._failures += 1

    def exposition(self, form: ExpositionFormat = ExpositionFormat.TEXT) -> bytes:
        """What Prometheus scrapes."""
        return render(self.registry, form)

    def collect(self) -> Iterator[Metric]:
        yield _gauge("exporter_build_info", "Version of the exporter.", [({"version": self._version}, 1)])
        yield _gauge("exporter_redis_up", "1 while the exporter reaches Redis.", [({}, self._levels is not None)])
        yield _gauge("exporter_poll_timestamp_seconds", "Unix time of the last poll.", [({}, self._polled_at)])
        yield _gauge("exporter_poll_seconds", "Duration of the last successful poll.", [({}, self._poll_seconds)])
        yield _counter("exporter_poll_failures", "Polls that Redis did not answer.", self._failures)
        if (levels := self._levels) is not None:
            yield from self._queues(levels)
            yield from _redis(levels.redis)

    def _queues(self, levels: ServiceLevels) -> Iterator[Metric]:
        of = [({"model": model.model, "queue": model.queue}, model) for model in levels.models]
        yield _gauge(
            "queue_messages",
            "Messages of the queue by state.",
            [
                (labels | {"state": state}, count)
                for labels, model in of
                for state, count in (
                    ("ready", sum(model.ready.values())),
                    ("unacked", model.leased),
                    ("dead", sum(model.dead.values())),
                )
            ],
        )
        yield _gauge(
            "queue_ready_messages",
            "Ready messages by priority step; 0 is served first.",
            [
                (labels | {"priority": str(step)}, model.ready.get(step, 0))
                for labels, model in of
                for step in self._sets.priority_steps
            ],
        )
        yield _gauge(
            "queue_oldest_message_age_seconds",
            "Age of the oldest ready message; 0 when none is ready.",
            [(labels, model.oldest_age_seconds or 0.0) for labels, model in of],
        )
        yield _gauge(
            "queue_blocked",
            "1 while Redis gives no messages of the queue to workers.",
            [(labels, model.blocked) for labels, model in of],
        )
        yield _gauge(
            "queue_run_out_leases",
            "Expired leases whose messages no worker has returned to the queue yet; any worker of the service does.",
            [(labels, model.run_out) for labels, model in of],
        )
        yield _gauge(
            "queue_dead_letters",
            "Dead letters kept, by reason.",
            [
                (labels | {"reason": reason}, count)
                for labels, model in of
                for reason, count in self._dead_by_reason(model.dead).items()
            ],
        )
        yield _gauge(
            "model_last_seen_timestamp_seconds",
            "Unix time at which a worker last said that it serves the model; 0 if none ever did.",
            [({"model": model.model}, model.last_seen or 0.0) for model in levels.models],
        )
        yield _gauge("exporter_models_left_out", "Registered models above the limit.", [({}, levels.models_left_out)])

    def _dead_by_reason(self, dead: Mapping[str, int]) -> dict[str, int]:
        counts = dict.fromkeys((*self._sets.dead_letter_reasons, OTHER), 0)
        for reason, count in dead.items():
            word = self._sets.dead_letter_reason(reason)
            counts[word] += count
        return counts


def _redis(redis: RedisLevels) -> Iterator[Metric]:
    yield _gauge("redis_memory_used_bytes", "Memory that Redis uses.", [({}, redis.memory_used_bytes)])
    yield _gauge("redis_memory_limit_bytes", "Redis's maxmemory; 0: no limit.", [({}, redis.memory_limit_bytes)])
    yield _gauge("redis_connected_clients", "Connections to Redis.", [({}, redis.connected_clients)])
    yield _gauge(
        "redis_persistence_ok",
        "1 while the last write of the append-only file and the last snapshot succeeded.",
        [({}, redis.persistence_ok)],
    )
    yield _gauge(
        "redis_may_evict",
        "1 while Redis may drop keys to make room: its maxmemory-policy is not noeviction.",
        [({}, redis.may_evict)],
    )
    yield _counter("redis_evicted_keys", "Keys that Redis dropped to make room.", redis.evicted_keys)
    yield _counter("redis_rejected_connections", "Connections that Redis refused.", redis.rejected_connections)


def _gauge(name: str, documentation: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> Metric:
    samples = list(samples)
    names = list(samples[0][0]) if samples else []
    family = GaugeMetricFamily(PREFIX + name, documentation, labels=names)
    for labels, value in samples:
        family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, documentation, value=value)
