"""`make fleet-burst`: how a burst of requests spreads over idle workers, and how long their first tokens take."""

import argparse
import time
from collections import Counter

from rich.console import Console
from rich.table import Table

from fleet.workers import SleepingService, sleeping_service
from headrace_broker import Client
from headrace_broker.streams.events import ChunkEvent, StartEvent
from headrace_cli.demo.stream_timing import percentile

PROMPT = "the wheel turns " * 150
"""About 480 tokens: a step of `STEP_TOKENS` computes four such prompts."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fleet.burst", description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-seconds", type=float, default=0.1, help="how long a step of the engine sleeps")
    options = parser.parse_args()
    table = Table("requests by worker", "TTFT p50, ms", "TTFT p99, ms", title=f"bursts of {options.requests} requests")
    with sleeping_service(options.step_seconds) as service:
        service.start_workers(options.workers)
        for number in range(options.rounds + 1):
            time.sleep(2.0)
            row = burst(service, options.requests)
            if number:  # the first one warms up
                table.add_row(*row)
    Console(width=100).print(table)


def burst(service: SleepingService, count: int) -> tuple[str, str, str]:
    params = {"max_tokens": 40, "ignore_eos": True}
    requests = [{"prompt": f"{time.monotonic_ns()} {PROMPT}", "sampling_params": params} for _ in range(count)]
    took: Counter[str] = Counter()
    first: dict[str, float] = {}
    with Client(service.url, model="tiny") as client:
        sent = time.monotonic()
        ids = client.submit_many(requests)  # type: ignore[arg-type]
        for request_id, event in client.events_many(ids, timeout=120):
            if isinstance(event, StartEvent):
                took[event.worker] += 1
            elif isinstance(event, ChunkEvent):
                first.setdefault(request_id, time.monotonic() - sent)
    times = [1000 * seconds for seconds in first.values()]
    spread = sorted(took.values(), reverse=True) + [0] * (len(service.workers) - len(took))
    return ", ".join(map(str, spread)), f"{percentile(times, 50):.0f}", f"{percentile(times, 99):.0f}"


if __name__ == "__main__":
    main()
