"""A parsed exposition, a clock that the test sets, and the stats of one step."""

from __future__ import annotations

import sys
from collections.abc import Callable

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from headrace_engine.core.outputs import StepStats
from headrace_monitoring.exposition import ExpositionFormat
from headrace_monitoring.gateway_metrics import GatewayMetrics
from headrace_monitoring.metrics import Metrics
from headrace_monitoring.redis_levels import RedisLevels, StreamServerLevels
from headrace_monitoring.service_levels import ModelLevels, ServiceExposition, ServiceLevels

STEP = StepStats(
    step_seconds=0.02,
    kind="mixed",
    num_tokens=120,
    num_requests=4,
    running=4,
    waiting=2,
    kv_blocks_used=30,
    kv_blocks_cached=10,
    kv_blocks_free=60,
    kv_blocks_total=100,
    prefix_queried_tokens=100,
    prefix_hit_tokens=48,
    preemptions=1,
    num_padded_tokens=11,
    compiled_graphs=8,
    fallback_operators=1,
    warm_up_seconds=2.5,
    lora_requests={"sql": [2, 1], "unheard-of": [1, 0], "another": [0, 3]},
    drafted_per_position=[4, 3, 3],
    accepted_per_position=[3, 1, 0],
    phase_seconds={"schedule": 0.001, "prepare": 0.002, "forward": 0.015, "sample": 0.001, "update": 0.001},
)


PROMETHEUS_ACCEPTS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
"""Prometheus's own header."""

EXPORTER = ServiceExposition(version="1.2.3", main="127.0.0.1:6379")
EXPORTER.polled(
    ServiceLevels(
        models=[
            ModelLevels(
                model="tiny",
                queue="headrace.tiny",
                ready={0: 3, 9: 1},
                leased=2,
                run_out=1,
                unread=2,
                dead={"poison": 1, "undecodable: ValueError": 2, "bad luck": 1},
                oldest_age_seconds=12.5,
                blocked=False,
                last_seen=900.0,
                used_requests=40,
                used_tokens={"prompt": 4000, "cached": 1000, "generated": 2000},
                outstanding_tokens={"waiting": 4000.0, "leased": 2000.0},
                tokens_per_second=500.0,
                earliest_slack_seconds=30.0,
            )
        ],
        servers=[
            RedisLevels(
                server="127.0.0.1:6379",
                memory_used_bytes=1000,
                memory_limit_bytes=0,
                connected_clients=4,
                persistence_ok=True,
                may_evict=False,
                evicted_keys=0,
                rejected_connections=0,
                started_at=0.0,
                loads_all=True,
                load_errors=0,
                messages_before_restart=0,
                messages_after_restart=0,
            )
        ],
        away=(),
        stream_servers=[StreamServerLevels(name="s1", up=True, streams=3, draining=False)],
    ),
    0.002,
)
"""An exporter after its first look at Redis."""


GATEWAY = GatewayMetrics(version="1.2.3").registry
"""A gateway that has just started."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Scrape:
    """A parsed exposition."""

    def __init__(self, metrics: Metrics) -> None:
        text = metrics.exposition().decode()
        self.families: list[Metric] = list(text_string_to_metric_families(text))
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families
            for sample in family.samples
        }

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.samples}

    def value(self, name: str, **labels: str) -> float:
        """The one sample with this name and, among others, these labels."""
        wanted = labels.items()
        values = [
            value for (found, have), value in self.samples.items() if found == name and wanted <= dict(have).items()
        ]
        assert len(values) == 1, f"{len(values)} samples match {name} {labels}"
        return values[0]


def calls_by_the_standard_writer(metrics: Metrics | ServiceExposition, form: ExpositionFormat) -> float:
    """Calls that a scrape makes, where one of the same registry by prometheus_client's text writer makes 1.

    Counted, because times differ on a busy machine. `benchmarks/metrics_cost.py` prints the time.
    """
    metrics.exposition(form)  # what is made once
    return _calls(lambda: metrics.exposition(form)) / _calls(lambda: generate_latest(metrics.registry))


def _calls(work: Callable[[], object]) -> int:
    """How many functions are called, Python's and C's."""
    count = 0

    def called(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
