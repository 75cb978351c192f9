"""The effect of preemption on interactive requests beside a batch, and its cost for the batch.

    python benchmarks/priority_ttft.py [--slots 16] [--turns 5] [--requests 20] [--rate 0.5] [--json FILE]

Two workers are loaded side by side. One of them preempts. They take turns, because the speed of a machine drifts. Each
turn has three windows, in which the same interactive requests (priority 0, 32 tokens) arrive one by one: alone, beside
a batch on the worker that does not preempt, and beside the same batch on the worker that preempts. The batch has
priority 9, 150 to 400 tokens, and always more requests than slots. A window ends with the last interactive token. The
batch's tokens in the window are its throughput, and the rest of the batch is cancelled.
"""

import argparse
import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import command_line
import runs
import workload
from headrace_broker import AsyncClient, ChunkEvent, StartEvent
from headrace_cli.demo.stream_timing import StreamTiming, percentile
from headrace_engine.checkpoints import default_model
from measurements import Setup, running_service, through_queue
from workload import BenchmarkRequest

_BATCHES = 8
"""Copies of a workload of 32 requests: more than fit in a window."""
_ALONE, _WITHOUT, _WITH = "alone", "beside a batch, without preemption", "beside a batch, with preemption"


@dataclass
class Batch:
    """A backlog of one worker, and its progress."""

    client: AsyncClient
    num_tokens: int = 0
    num_continued: int = 0
    """Attempts that continued an earlier one."""
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, slots: int) -> None:
        """Send the batch and follow it. If this task is cancelled, cancel the requests that have not ended."""
        request_ids = await self.client.submit_many(
            {
                "prompt_token_ids": request.prompt_token_ids,
                "sampling_params": request.sampling_params,
                "priority": 9,
            }
            for request in workload.load("long-outputs") * _BATCHES
        )
        started: set[str] = set()
        begun: set[str] = set()
        try:
            async for request_id, event in self.client.events_many(request_ids, timeout=600):
                if isinstance(event, StartEvent):
                    self.num_continued += request_id in started
                    started.add(request_id)
                elif isinstance(event, ChunkEvent):
                    self.num_tokens += len(event.token_ids)
                    begun.add(request_id)
                    if len(begun) >= slots:
                        self.has_begun.set()
        finally:
            await asyncio.gather(*(self.client.cancel(request_id) for request_id in request_ids))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command_line.add_model_options(parser)
    parser.add_argument("--slots", type=command_line.count, default=16, help="requests that a worker runs at once [16]")
    parser.add_argument("--turns", type=command_line.count, default=5, help="of each kind [5]")
    parser.add_argument("--requests", type=command_line.count, default=20, help="interactive ones a turn [20]")
    parser.add_argument("--rate", type=float, default=0.5, help="interactive ones a second [0.5]")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    args.model = args.model or str(default_model.fetch(args.dtype))
    setup = Setup(args.model, args.dtype, "mixed", args.rate, args.quantization, args.kv_cache_dtype)
    figures = asyncio.run(_measure(setup, args))
    report(figures, f"{command_line.describe(args)}, {args.slots} slots, {args.rate:g} interactive requests/s")
    if args.json:
        runs.save(args.json, **command_line.engine_options(args), slots=args.slots, rate=args.rate, **figures)


async def _measure(setup: Setup, args: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {name: [] for name in (_ALONE, _WITHOUT, _WITH)}
    async with (
        running_service(setup, max_num_seqs=args.slots, max_preemptions=0) as without,
        running_service(setup, max_num_seqs=args.slots) as preempting,
    ):
        sides = {_ALONE: (preempting, False), _WITHOUT: (without, True), _WITH: (preempting, True)}
        with Console(stderr=True).status("") as status:
            for turn in range(args.turns):
                for name in sorted(sides, reverse=turn % 2 == 1):  # each goes first in turn
                    status.update(f"{name}, turn {turn + 1} of {args.turns}")
                    client, has_batch = sides[name]
                    batch = Batch(client) if has_batch else None
                    figures[name].append(await _window(client, batch, turn, args))
    return figures


async def _window(client: AsyncClient, batch: Batch | None, turn: int, args: argparse.Namespace) -> dict[str, Any]:
    task = None
    if batch is not None:
        task = asyncio.create_task(batch.run(args.slots))
        await batch.has_begun.wait()
    tokens_before, started = batch.num_tokens if batch else 0, time.perf_counter()
    timings, _ = await through_queue(client, _interactive(turn, args.requests), _arrivals(args))
    seconds = time.perf_counter() - started
    tokens = batch.num_tokens - tokens_before if batch else 0
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await _until_idle(client, Path(args.model).name)
    return {
        "seconds": seconds,
        "ttft_ms": [1000 * (each.time_to_first_token or 0.0) for each in timings],
        "itl_ms": [1000 * gap for each in timings for gap in each.gaps],
        "interactive_tokens": _tokens(timings),
        "batch_tokens": tokens,
        "continued": batch.num_continued if batch else 0,
    }


def _arrivals(args: argparse.Namespace) -> list[float]:
    return workload.arrivals(args.requests, args.rate)


def _interactive(turn: int, count: int) -> list[BenchmarkRequest]:
    """Return prompts of some dozens of tokens. They differ in each turn, so that no prefix cache has them."""
    prompts = workload.load("long-outputs")
    return [
        BenchmarkRequest([1000 + turn, *prompts[number % len(prompts)].prompt_token_ids], 32) for number in range(count)
    ]


def _tokens(timings: list[StreamTiming]) -> int:
    return sum(each.num_tokens for each in timings)


async def _until_idle(client: AsyncClient, model: str) -> None:
    """Wait until the queue is empty. A cancelled request that waits leaves the queue when a worker takes it."""
    while any(each.num_ready or each.leased for each in (await client.queue_levels([model])).values()):
        await asyncio.sleep(0.1)


def report(figures: dict[str, Any], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("interactive requests", "TTFT p50, ms", "p95", "between tokens p50, ms", "batch tokens/s", "all"):
        table.add_column(column, justify="right" if table.columns else "left")
    for name, windows in figures.items():
        ttft = [value for window in windows for value in window["ttft_ms"]]
        gaps = [value for window in windows for value in window["itl_ms"]]
        seconds = sum(window["seconds"] for window in windows)
        batch = sum(window["batch_tokens"] for window in windows)
        total = batch + sum(window["interactive_tokens"] for window in windows)
        rates = (f"{batch / seconds:.1f}" if batch else "", f"{total / seconds:.1f}")
        latencies = (percentile(ttft, 50), percentile(ttft, 95), percentile(gaps, 50))
        table.add_row(name, *(f"{value:.0f}" for value in latencies), *rates)
    console = Console()
    console.print(table)
    continued = sum(window["continued"] for window in figures[_WITH])
    console.print(f"{continued} times a request of the batch was continued after it had been preempted")


if __name__ == "__main__":
    main()
