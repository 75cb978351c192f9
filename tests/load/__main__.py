"""`make load`: ten thousand queued requests and a thousand live subscribers, on an engine that only sleeps.

The exit status is 1 if a request was not served, a key was left over, or memory grew without bound.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from chaos.model import save_chaos_model
from headrace_broker.server.embedded import EmbeddedServer
from load.harness import Harness, Plan, Report
from service.workers.service import Service


def main() -> int:
    default = Plan()
    parser = argparse.ArgumentParser(prog="python -m load", description=__doc__)
    parser.add_argument("--requests", type=int, default=default.requests)
    parser.add_argument("--tokens", type=int, default=default.tokens, help="of each request")
    parser.add_argument("--subscribers", type=int, default=default.subscribers)
    parser.add_argument("--step-seconds", type=float, default=default.step_seconds, help="how long the engine sleeps")
    parser.add_argument("--slots", type=int, default=default.slots, help="requests that run at once")
    parser.add_argument("--ttl-seconds", type=int, default=default.ttl_seconds, help="lifetime of streams and results")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--json", metavar="FILE", help="write all measurements to FILE")
    plan = Plan(**{name: value for name, value in vars(parser.parse_args()).items() if name != "json"})
    file = parser.parse_args().json
    with tempfile.TemporaryDirectory() as temporary, EmbeddedServer(environ={}, password=False) as server:
        service = Service(server, save_chaos_model(Path(temporary) / "tiny"), Path(temporary))
        try:
            report = Harness(service, plan, Path(temporary), os.environ.__setitem__).run()
        finally:
            service.close()
    console = Console(width=None if sys.stdout.isatty() else 140)
    for table in tables(report):
        console.print(table)
    for problem in report.problems:
        console.print(problem, style="red", markup=False)
    if file:
        Path(file).write_text(json.dumps(asdict(report), indent=1, default=sorted))
    return 1 if report.problems else 0


def tables(report: Report) -> list[Table]:
    plan = report.plan
    cost = Table("cost", "", title=f"{plan.requests} requests, {report.chunks} chunks, {report.seconds:.0f} s")
    rows = {
        "worker, us of CPU per request of one token": f"{report.worker_us_a_request:.0f}",
        "worker, us of CPU per chunk, in addition": f"{report.worker_us_a_chunk:.1f}",
        "calls to Redis, included in that": f"{report.publisher_us_a_chunk:.1f}",
        "entries per call": f"{report.publish['entries'] / report.publish['calls']:.1f}",
        "Redis, us of CPU per chunk": f"{report.cpu['redis'] / report.chunks * 1e6:.1f}",
        "subscribers, us of CPU per chunk": f"{report.cpu['subscribers'] / report.chunks * 1e6:.1f}",
        "engine process, us of CPU per token": f"{report.cpu['engine'] / report.chunks * 1e6:.1f}",
        "worker and Redis, share of the machine": f"{_share(report):.1%}",
        "subscribers in a blocking read, median": f"{_listening(report):.0f}",
        "chunks per second": f"{report.chunks / report.seconds:.0f}",
        "sleep of the engine, seconds": f"{plan.seconds:.0f}",
        "keys in Redis before and after": f"{len(report.keys_before)}, {len(report.keys_after)}",
    }
    for name, value in rows.items():
        cost.add_row(name, value)
    waits = Table("tenant", "wait p50", "wait p99", "TTFT p50", "TTFT p99", title="seconds")
    for tenant, values in report.waits.items():
        waits.add_row(tenant, *(f"{value:.2f}" for value in values.values()))
    memory = Table("MiB", "first", "halfway", "last", "highest", "growth per minute, second half")
    for name in ("worker", "engine", "redis", "redis_data", "subscribers"):
        series = [getattr(sample, name) for sample in report.samples]
        if series:
            ends = (series[0], series[len(series) // 2], series[-1], max(series), round(report.growth(name), 2))
            memory.add_row(name, *map(str, ends))
    return [cost, waits, memory]


def _share(report: Report) -> float:
    return (report.cpu["worker"] + report.cpu["redis"]) / report.seconds / (os.cpu_count() or 1)


def _listening(report: Report) -> float:
    """Return the median of the first nine tenths: later there are fewer requests than subscribers."""
    return statistics.median([s.listening for s in report.samples if s.seconds < 0.9 * report.seconds] or [0])


if __name__ == "__main__":
    sys.exit(main())
