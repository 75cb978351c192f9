"""What the queue costs: requests through Celery and Redis against the same engine without them.

    python benchmarks/queue_cost.py [--dtype float32] [--turns 5] [--json FILE]

An `AsyncLLMEngine` and a worker are loaded side by side and take turns, as the speed of a machine drifts: first with
the whole mixed workload at once, then with short requests one by one, whose time to the first token is compared. Both
stream every token to this process. Prefix caching is off, as every turn has the same prompts.
"""

import argparse
import asyncio
import statistics
import time
from typing import Any

from rich.console import Console
from rich.table import Table

import command_line
import runs
from headrace_workers import default_model
from measurements import Setup, running_engine, running_service, through_engine, through_queue
from workload import BenchmarkRequest

_ALONE = BenchmarkRequest([1, 2, 3, 4] * 8, 1)
_REQUESTS_ALONE = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command_line.add_model_options(parser)
    parser.add_argument("--turns", type=int, default=5, help="of each on the whole workload")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    model = args.model or str(default_model.fetch(args.dtype))
    setup = Setup(model, args.dtype, "mixed", 0.0, args.quantization, enable_prefix_caching=False)
    figures = asyncio.run(_measure(setup, args.turns))
    report(figures, command_line.describe(args))
    if args.json:
        runs.save(args.json, dtype=args.dtype, **figures)


async def _measure(setup: Setup, turns: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"tokens_per_second": {"engine": [], "queue": []}, "ttft_ms": {"engine": [], "queue": []}}
    requests = setup.requests()
    at_once = [0.0] * len(requests)
    async with running_engine(setup) as engine, running_service(setup) as client:
        sides = {
            "engine": lambda requests: through_engine(engine, requests, at_once[: len(requests)]),
            "queue": lambda requests: through_queue(client, requests),
        }
        with Console(stderr=True).status("") as status:
            for turn in range(turns + 1):  # the first one takes memory and is not counted
                for name, through in sides.items():
                    status.update(f"{name}, turn {turn} of {turns}")
                    started = time.perf_counter()
                    await through(requests)
                    speed = sum(request.max_tokens for request in requests) / (time.perf_counter() - started)
                    if turn:
                        figures["tokens_per_second"][name].append(speed)
            for _ in range(_REQUESTS_ALONE):
                for name, through in sides.items():
                    started = time.perf_counter()
                    await through([_ALONE])
                    figures["ttft_ms"][name].append(1000 * (time.perf_counter() - started))
    return figures


def report(figures: dict[str, Any], title: str) -> None:
    speeds, firsts = figures["tokens_per_second"], figures["ttft_ms"]
    table = Table(title=f"mixed, {title}, medians", title_justify="left")
    for column in ("", "engine alone", "through the queue", ""):
        table.add_column(column, justify="right")
    speed = {name: statistics.median(each) for name, each in speeds.items()}
    first = {name: statistics.median(each) for name, each in firsts.items()}
    # of the pairs, each measured within a second or less: the medians of all drift with the machine
    later = statistics.median(queue - engine for engine, queue in zip(firsts["engine"], firsts["queue"], strict=True))
    for what, each, difference in (
        ("output tokens/s", speed, f"{speed['queue'] / speed['engine']:.3f} x"),
        ("one request alone, ms to its only token", first, f"{later:+.1f}, median of pairs"),
    ):
        table.add_row(what, f"{each['engine']:.1f}", f"{each['queue']:.1f}", difference)
    Console().print(table)


if __name__ == "__main__":
    main()
