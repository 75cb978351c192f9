"""The metrics of the exporter: the queues and their Redis. They exist without any worker.

The queue's families have the same names as a worker's, so that one panel shows both. The code that reads Redis is in
headrace_cli.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace_monitoring.exposition import ExpositionFormat, render
from headrace_monitoring.labels import OTHER, dead_letter_reason
from headrace_monitoring.redis_levels import RedisLevels, StreamServerLevels, redis_families, stream_server_families
from headrace_monitoring.sampled_families import counter, gauge
from headrace_wire.codes import DEAD_LETTER_LABELS, PRIORITY_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLevels:
    """The queue of a model at one moment. Counts are messages."""

    model: str
    queue: str
    ready: Mapping[int, int]
    """Ready messages by priority step."""
    leased: int
    run_out: int
    """Expired leases whose messages no worker has returned to the queue."""
    dead: Mapping[str, int]
    """Dead letters by the broker's reason."""
    oldest_age_seconds: float | None
    unread: int
    """Messages in lists that no worker reads, because their producers set `sep` or `global_keyprefix`."""
    blocked: bool
    """A key of the queue has the wrong type, so that no worker gets messages."""
    last_seen: float | None
    """Unix time at which a worker last reported that it serves the model; None: no worker ever did."""
    used_requests: int
    """Requests in the usage ledger that ended since 00:00 UTC."""
    used_tokens: Mapping[str, int]
    """Their tokens: `prompt`, `cached` (among those of the prompts) and `generated`."""
    outstanding_tokens: Mapping[str, float] | None
    """Expected tokens of the messages that are due, by state; None: there is nothing to estimate them from."""
    tokens_per_second: float | None
    """Tokens that one busy worker computes in a second; None: no worker has measured it."""

    earliest_slack_seconds: float | None
    """Time until the first waiting message expires, negative if it has; None: no waiting message has a deadline."""

    @property
    def outstanding_seconds(self) -> float | None:
        """Time in which one worker computes the outstanding tokens; None if it is unknown. No tokens take no time."""
        if self.outstanding_tokens is None:
            return None
        tokens = sum(self.outstanding_tokens.values())
        if not tokens:
            return 0.0
        return None if self.tokens_per_second is None else tokens / self.tokens_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevels:
    """The result of one poll."""

    models: Sequence[ModelLevels]
    servers: Sequence[RedisLevels]
    """The main server and those of `HEADRACE_QUEUE_URLS`, without those that are away."""
    away: Collection[str]
    """The addresses of the servers that could not be read. The main server is never one of them."""
    models_left_out: int = field(default=0)
    """Registered models above the limit of the exporter."""
    stream_servers: Sequence[StreamServerLevels] = ()


class ServiceExposition(Collector):
    """Exports the newest poll. A scrape reads memory only.

    While the main server does not answer, the queues' series are absent, since neither the last values nor 0 would be
    true. While another server does not, those of its queues are.

    Args:
        version: version of Headrace.
        main: the address of the main server.
        clock: returns the unix time in seconds.
    """

    def __init__(self, *, version: str, main: str, clock: Callable[[], float] = time.time) -> None:
        self._version = version
        self._main = main
        self._clock = clock
        self._levels: ServiceLevels | None = None
        self._polled_at = clock()
        self._poll_seconds = 0.0
        self._failures = 0
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def polled(self, levels: ServiceLevels, seconds: float) -> None:
        """Record a poll that the main server answered in `seconds`."""
        self._levels, self._polled_at, self._poll_seconds = levels, self._clock(), seconds

    def failed(self) -> None:
        """Record a poll that the main server did not answer."""
        self._levels, self._polled_at = None, self._clock()
        self._failures += 1

    def exposition(self, form: ExpositionFormat = ExpositionFormat.TEXT) -> bytes:
        """Return the response to a scrape."""
        return render(self.registry, form)

    def collect(self) -> Iterator[Metric]:
        yield gauge("exporter_build_info", "Version of the exporter.", [({"version": self._version}, 1)])
        yield gauge(
            "exporter_redis_up",
            "1 while the exporter reaches the Redis server.",
            [({"server": server}, up) for server, up in self._servers().items()],
        )
        yield gauge("exporter_poll_timestamp_seconds", "Unix time of the last poll.", [({}, self._polled_at)])
        yield gauge("exporter_poll_seconds", "Duration of the last successful poll.", [({}, self._poll_seconds)])
        yield counter(
            "exporter_poll_failures", "Polls that the main Redis server did not answer.", [({}, self._failures)]
        )
        if (levels := self._levels) is not None:
            yield from self._queues(levels)
            yield from redis_families(levels.servers)
            yield from stream_server_families(levels.stream_servers)

    def _servers(self) -> dict[str, bool]:
        """Return which servers were reached. While the main server is away, the others are not read."""
        if self._levels is None:
            return {self._main: False}
        return {server.server: True for server in self._levels.servers} | dict.fromkeys(self._levels.away, False)

    def _queues(self, levels: ServiceLevels) -> Iterator[Metric]:
        of = [({"model": model.model, "queue": model.queue}, model) for model in levels.models]
        yield gauge(
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
        yield gauge(
            "queue_ready_messages",
            "Ready messages by priority; 0 is served first.",
            [
                (labels | {"priority": str(step)}, model.ready.get(step, 0))
                for labels, model in of
                for step in PRIORITY_STEPS
            ],
        )
        yield gauge(
            "queue_oldest_message_age_seconds",
            "Age of the oldest ready message; 0: none is ready.",
            [(labels, model.oldest_age_seconds or 0.0) for labels, model in of],
        )
        yield gauge(
            "queue_blocked",
            "1 while Redis gives no messages of the queue to workers.",
            [(labels, model.blocked) for labels, model in of],
        )
        yield gauge(
            "queue_unread_messages",
            "Messages in lists that no worker reads, because of their producers' sep, global_keyprefix or server.",
            [(labels, model.unread) for labels, model in of],
        )
        yield gauge(
            "queue_run_out_leases",
            "Expired leases whose messages no worker has returned to the queue yet.",
            [(labels, model.run_out) for labels, model in of],
        )
        yield gauge(
            "queue_dead_letters",
            "Dead letters kept, by reason.",
            [
                (labels | {"reason": reason}, count)
                for labels, model in of
                for reason, count in self._dead_by_reason(model.dead).items()
            ],
        )
        yield gauge(
            "outstanding_tokens",
            "Expected prompt and output tokens of the messages that are due. Absent: no request ended in the last day.",
            [
                (labels | {"state": state}, tokens)
                for labels, model in of
                for state, tokens in (model.outstanding_tokens or {}).items()
            ],
        )
        yield gauge(
            "worker_tokens_per_second",
            "Prompt and output tokens that one busy worker of the model computes a second; 0: none measured it yet.",
            [({"model": model.model}, model.tokens_per_second or 0.0) for model in levels.models],
        )
        yield gauge(
            "outstanding_worker_seconds",
            "Time in which one worker computes the outstanding tokens. Absent: its speed or their number is unknown.",
            [(labels, seconds) for labels, model in of if (seconds := model.outstanding_seconds) is not None],
        )
        yield gauge(
            "earliest_slack_seconds",
            "Time until the earliest deadline of the waiting messages; negative: it has passed. Absent: none has one.",
            [(labels, slack) for labels, model in of if (slack := model.earliest_slack_seconds) is not None],
        )
        yield counter(
            "usage_requests",
            "Requests of the usage ledger. Begins at 0 every day at 00:00 UTC.",
            [(labels, model.used_requests) for labels, model in of],
        )
        yield counter(
            "usage_tokens",
            "Tokens of the usage ledger. Begins at 0 every day at 00:00 UTC. Cached tokens are among those of prompts.",
            [(labels | {"kind": kind}, tokens) for labels, model in of for kind, tokens in model.used_tokens.items()],
        )
        yield gauge(
            "model_last_seen_timestamp_seconds",
            "Unix time at which a worker last reported that it serves the model; 0: no worker ever did.",
            [({"model": model.model}, model.last_seen or 0.0) for model in levels.models],
        )
        yield gauge("exporter_models_left_out", "Registered models above the limit.", [({}, levels.models_left_out)])

    def _dead_by_reason(self, dead: Mapping[str, int]) -> dict[str, int]:
        counts = dict.fromkeys((*DEAD_LETTER_LABELS, OTHER), 0)
        for reason, count in dead.items():
            word = dead_letter_reason(reason)
            counts[word] += count
        return counts
