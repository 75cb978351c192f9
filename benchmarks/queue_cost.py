"""The cost of the queue: requests through Celery and Redis, compared with the same engine without them.

    python benchmarks/queue_cost.py [--dtype float32] [--turns 5] [--json FILE]

An `AsyncLLMEngine` and a worker are loaded side by side and take turns, because the speed of a machine drifts. Each
turn has the whole mixed workload at once. After the turns, short requests are sent one by one, and their times to the
first token are compared. Both stream every token to this process. Prefix caching is off, because every turn has the
same prompts.

A machine drifts by more than the cost of the queue. So the mean of the pairs is shown with its standard error, and the
processor time of this process, Redis and the worker is counted too. The processes in which the engines compute are
left out, because their threads spin while they wait.
"""

import argparse
import asyncio
import os
import statistics
import time
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

import command_line
import runs
from headrace_engine.checkpoints import default_model
from measurements import Setup, running_engine, running_service, through_engine, through_queue
from workload import BenchmarkRequest

_ALONE = BenchmarkRequest([1, 2, 3, 4] * 8, 1)
_REQUESTS_ALONE = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command_line.add_model_options(parser)
    parser.add_argument("--turns", type=command_line.count, default=5, help="of each on the whole workload")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    model = args.model or str(default_model.fetch(args.dtype))
    setup = Setup(model, args.dtype, "mixed", 0.0, args.quantization, args.kv_cache_dtype, enable_prefix_caching=False)
    figures = asyncio.run(_measure(setup, args.turns))
    report(figures, command_line.describe(args))
    if args.json:
        runs.save(args.json, **command_line.engine_options(args), **figures)


async def _measure(setup: Setup, turns: int) -> dict[str, Any]:
    kinds = ("tokens_per_second", "processor_seconds", "processor_percent", "ttft_ms")
    figures: dict[str, Any] = {kind: {"engine": [], "queue": []} for kind in kinds}
    requests = setup.requests()
    at_once = [0.0] * len(requests)
    async with running_engine(setup) as engine, running_service(setup) as client:
        sides = {
            "engine": lambda requests: through_engine(engine, requests, at_once[: len(requests)]),
            "queue": lambda requests: through_queue(client, requests),
        }
        beside, cores = _beside_the_engines(), len(os.sched_getaffinity(0))
        with Console(stderr=True).status("") as status:
            for turn in range(turns + 1):  # the first turn allocates memory and is not counted
                for name in sorted(sides, reverse=turn % 2 == 1):  # each goes first in turn
                    status.update(f"{name}, turn {turn} of {turns}")
                    used_before, started = runs.processor_seconds(beside), time.perf_counter()
                    await sides[name](requests)
                    seconds = time.perf_counter() - started
                    if turn:
                        used = runs.processor_seconds(beside) - used_before
                        figures["tokens_per_second"][name].append(sum(each.max_tokens for each in requests) / seconds)
                        figures["processor_seconds"][name].append(used)
                        figures["processor_percent"][name].append(100 * used / seconds / cores)
            for _ in range(_REQUESTS_ALONE):
                for name, through in sides.items():
                    started = time.perf_counter()
                    await through([_ALONE])
                    figures["ttft_ms"][name].append(1000 * (time.perf_counter() - started))
    return figures


def _beside_the_engines() -> list[psutil.Process]:
    """Return this process, the server and the worker, without the processes in which the two engines compute."""
    children = psutil.Process().children()
    return [psutil.Process(), *(child for child in children if "headrace_engine.core.child" not in child.cmdline())]


def report(figures: dict[str, Any], title: str) -> None:
    table = Table(title=f"mixed, {title}, medians", title_justify="left")
    for column in ("", "engine alone", "through the queue", "median of pairs"):
        table.add_column(column, justify="right")

    def row(what: str, kind: str, digits: int, difference: str) -> None:
        alone, queued = figures[kind]["engine"], figures[kind]["queue"]
        # compare the pairs, measured one after the other: medians over all turns drift with the machine
        ratios = [queue / engine for engine, queue in zip(alone, queued, strict=True)]
        added = statistics.median(queue - engine for engine, queue in zip(alone, queued, strict=True))
        medians = [f"{statistics.median(each):.{digits}f}" for each in (alone, queued)]
        table.add_row(what, *medians, difference.format(ratio=statistics.median(ratios), added=added))
        if kind == "tokens_per_second" and len(ratios) > 1:
            error = statistics.stdev(ratios) / len(ratios) ** 0.5
            table.add_row("the same, mean of pairs", "", "", f"{statistics.mean(ratios):.3f} ± {error:.3f} x")

    row("output tokens/s", "tokens_per_second", 1, "{ratio:.3f} x")
    row("processor seconds beside the engine's", "processor_seconds", 2, "{added:+.2f}")
    row("the same, % of the machine", "processor_percent", 2, "{added:+.2f}")
    row("one request alone, ms to its only token", "ttft_ms", 1, "{added:+.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
