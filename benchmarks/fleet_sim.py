"""A simulated fleet of workers that pull from one queue, compared with routers that push to workers.

    python benchmarks/fleet_sim.py [--quick] [--processes 2] [--seed 1] [--json FILE] [--plot FILE]
    python benchmarks/fleet_sim.py --real 4 [--json FILE]

Nothing here is a measurement of an engine: a step takes 12 ms, 0.25 ms for each running request and 0.04 ms for each
token of a prompt. Outputs have 150 tokens and prompts 400 in the median, with long tails. No policy knows them.
`--real` runs real workers whose engines sleep, sends them requests, and simulates the same requests.

The simulated workers take messages by the product's own rules: `choices_to_fetch`, `TokenCredit`, the default quantum
and lease, the grace of prefix affinity, and its limits in the fetch script.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

import command_line
import plot
import runs
from fleet_model.cases import Case, full_table, quick_table, simulate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few hundred requests a cell: seconds, rough figures")
    parser.add_argument("--real", type=command_line.count, metavar="N", help="compare with N real workers instead")
    parser.add_argument("--seconds", type=float, default=120.0, help="for which --real sends requests")
    parser.add_argument("--load", type=float, default=0.8, help="of --real, as a share of what the workers serve")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=command_line.count, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", metavar="FILE", help="draw TTFT p99 at load 0.9 there, as SVG")
    args = parser.parse_args()
    if not 0 < args.load <= 2:
        parser.error(f"--load must be above 0 and at most 2, got {args.load:g}")
    if not 10 <= args.seconds <= 3600:
        parser.error(f"--seconds must be from 10 to 3600, got {args.seconds:g}")
    if args.real is not None:
        from fleet_model import agreement  # it needs the tests' programs

        figures = agreement.compare(args.real, args.load, args.seconds, args.seed)
        agreement.report(figures)
        if args.json:
            runs.save(args.json, **figures)
        return
    started = time.perf_counter()
    cells = run_cells(list(quick_table() if args.quick else full_table()), args.seed, args.processes)
    report(cells)
    print(f"{len(cells)} cells in {time.perf_counter() - started:.0f} s with {args.processes} processes")
    if args.json:
        runs.save(args.json, cells=cells)
    if args.plot:
        shown = {f"{cell['case']}, {cell['policy']}": cell["ttft_ms_p99"] for cell in cells if cell["load"] == 0.9}
        plot.bars(args.plot, "Simulated time to first token, p99, ms, at load 0.9", shown)


def run_cells(cases: Sequence[Case], seed: int, processes: int) -> list[dict[str, Any]]:
    """Simulate all cells, the largest first, and return them in the order of the table."""
    todo = [(case, policy, seed) for case in cases for policy in case.policies]
    order = sorted(range(len(todo)), key=lambda index: -todo[index][0].count)
    cells: dict[int, dict[str, Any]] = {}
    with multiprocessing.Pool(processes) as pool:
        for index, cell in zip(order, pool.imap(_cell, [todo[index] for index in order]), strict=True):
            cells[index] = cell
            if sys.stderr.isatty():
                print(f"\r{len(cells)} of {len(todo)} cells", end="", file=sys.stderr, flush=True)
    return [cells[index] for index in range(len(todo))]


def _cell(job: tuple[Case, str, int]) -> dict[str, Any]:
    return simulate(*job)


def report(cells: Sequence[dict[str, Any]]) -> None:
    table = Table(
        "fleet", "load", "policy", "TTFT p50, ms", "p99, ms", "latency p50, s", "p99, s", "ms a token p50", "p99",
        "tokens repeated", "cache hits, %", title="simulated",
    )  # fmt: skip
    for cell in cells:
        hits = "" if cell["hit_percent"] is None else f"{cell['hit_percent']:.0f}"
        table.add_row(
            cell["case"], f"{cell['load']:g}", cell["policy"],
            f"{cell['ttft_ms_p50']:.0f}", f"{cell['ttft_ms_p99']:.0f}",
            f"{cell['latency_s_p50']:.2f}", f"{cell['latency_s_p99']:.2f}",
            f"{cell['token_ms_p50']:.1f}", f"{cell['token_ms_p99']:.1f}",
            str(cell["repeated_tokens"] or ""), hits,
        )  # fmt: skip
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
