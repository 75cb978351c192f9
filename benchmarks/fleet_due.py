"""Shares of due times that are met, and the TTFT of chats, by the order of the queue: simulated, and with real workers.

    python benchmarks/fleet_due.py [--seconds 2880] [--seed 1] [--json FILE]
    python benchmarks/fleet_due.py --real 2 [--seconds 60] [--json FILE]

Half of the load of 0.9 are chats, and the rest is work in bursts: due after a short or a long window, or not due. The
orders are those of `fleet_model/due_times.py`. Real workers have engines that sleep, and get the same requests in each
order. The simulation is of a bigger fleet for a longer time. It has no preemption: a chat waits for the next free slot.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

import command_line
import runs
from fleet_model.due_times import ORDERS, Work, simulate, simulated_work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=command_line.count, metavar="N", help="run N real workers instead")
    parser.add_argument("--seconds", type=float, help="for which requests are sent [2880 simulated, 60 real]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    seconds = args.seconds if args.seconds is not None else 2880.0 if args.real is None else 60.0
    if not 10 <= seconds <= 36_000:
        parser.error(f"--seconds must be from 10 to 36000, got {seconds:g}")
    if args.real is None:
        work, plan = simulated_work(4, 16, seconds=seconds)
        rows = [simulate(order, work, plan, args.seed) for order in ORDERS]
        report(f"simulated, {plan.num_workers} workers of {plan.slots} slots", work, rows)
    else:
        from fleet_model import due_real  # it needs the tests' programs

        work, rows = due_real.run(args.real, seconds, args.seed)
        report(f"{args.real} real workers of {due_real.SLOTS} slots, sleeping engines", work, rows)
    if args.json:
        runs.save(args.json, rows=rows, seconds=seconds, seed=args.seed, short=work.short, long=work.long)


def report(title: str, work: Work, rows: Sequence[dict[str, Any]]) -> None:
    title = f"{title}, load {work.load:g}, bursts of {work.burst}, {work.seconds:g} s"
    table = Table(
        "order", f"due in {work.short:g} s, met, %", f"due in {work.long:g} s, met, %", "chats, TTFT p50, ms", "p95",
        "no due time, latency p50, s", title=title,
    )  # fmt: skip
    for row in rows:
        shown = [
            "" if value is None else f"{value:g}" for name, value in row.items() if name not in ("order", "requests")
        ]
        table.add_row(row["order"], *shown)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
