"""The cost of the metrics of one engine step for the worker, in microseconds of processor time.

    .venv/bin/python benchmarks/metrics_cost.py

The worker's process spends this time while the engine's process computes the next step. The last column shows the
duration of a step of which this time is 1%.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from headrace_monitoring.exposition import ExpositionFormat
from headrace_monitoring.labels import LabelSets
from headrace_monitoring.metrics import Metrics, Publication
from headrace_monitoring.redis_levels import RedisLevels
from headrace_monitoring.service_levels import ModelLevels, ServiceExposition, ServiceLevels
from unit.monitoring.scrape import STEP

TRACE = "0af7651916cd43dd8448eb211c80319c"
REPEATS = 30


def best(work: Callable[[], object], times: int) -> float:
    """Return the seconds of this thread for one call, in the fastest of several rounds."""
    rounds = []
    for _ in range(REPEATS):
        started = time.thread_time()
        for _ in range(times):
            work()
        rounds.append((time.thread_time() - started) / times)
    return min(rounds)


def exporter_of(models: int) -> ServiceExposition:
    found = [
        ModelLevels(
            model=f"model-{number}",
            queue=f"queue-{number}",
            ready={0: 3, 9: 1},
            leased=2,
            run_out=1,
            dead={"poison": 1},
            oldest_age_seconds=12.5,
            unread=0,
            blocked=False,
            last_seen=900.0,
            used_requests=40,
            used_tokens={"prompt": 4000, "cached": 1000, "generated": 2000},
            outstanding_tokens={"waiting": 4000.0, "leased": 2000.0},
            tokens_per_second=500.0,
            earliest_slack_seconds=30.0,
        )
        for number in range(models)
    ]
    redis = RedisLevels(
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
    exposition = ServiceExposition(version="0", main="127.0.0.1:6379")
    exposition.polled(ServiceLevels(models=found, servers=[redis], away=()), 0.002)
    return exposition


def main() -> None:
    metrics = Metrics(model="m", queue="q", label_sets=LabelSets(tenants=tuple(f"tenant-{i}" for i in range(50))))
    print("requests in the step | traced | µs a step | 1% of a step of")
    for requests in (1, 8, 64):
        for trace_id in (None, TRACE):

            def step(requests: int = requests, trace_id: str | None = trace_id) -> None:
                metrics.step(STEP)
                followed: Counter[tuple[int, float, str | None]] = Counter()
                for _ in range(requests):
                    followed[1, 0.02, trace_id] += 1
                metrics.published(Publication(requests, followed, 0.001, 0.001))
                metrics.entries_written(requests, 0.001)

            seconds = best(step, 50)
            print(f"{requests:20} | {'yes' if trace_id else 'no':6} | {1e6 * seconds:9.0f} | {1e5 * seconds:.1f} ms")
    exporter = exporter_of(10)
    for form in ExpositionFormat:
        seconds = best(partial(metrics.exposition, form), 3)
        print(f"scrape of a worker with 50 tenants, {form.name.lower()}: {1e3 * seconds:.1f} ms")
        seconds = best(partial(exporter.exposition, form), 3)
        print(f"scrape of an exporter with 10 models, {form.name.lower()}: {1e3 * seconds:.1f} ms")


if __name__ == "__main__":
    main()
