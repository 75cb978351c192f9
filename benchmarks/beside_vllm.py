"""Headrace's engine and vLLM in turns, each loaded once, in a process of its own: two warm engines on one machine.

    python benchmarks/beside_vllm.py --vllm PYTHON [--dtype float32] [--workloads mixed] [--turns 3] [--json FILE]

Output tokens a second of each turn, without prefix caching; the first workload runs once before what is counted. Both
have the same model, requests and type of numbers, and their own defaults otherwise.
"""

import argparse
import os
from typing import Any

from rich.console import Console
from rich.table import Table

import command_line
import runs
import workload

SPEED = "output_tokens_per_second"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command_line.add_model_options(parser)
    parser.add_argument("--vllm", metavar="PYTHON", required=True, help="the Python that has it installed")
    parser.add_argument("--workloads", nargs="+", choices=workload.NAMES, default=workload.NAMES[:3])
    parser.add_argument("--turns", type=command_line.count, default=3)
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    measured: dict[str, dict[str, list[dict[str, Any]]]] = {}
    console = Console(stderr=True)
    engines = command_line.loaded(args)
    for name, engine in engines.items():
        with console.status(f"{name} begins"):
            engine.ask(args.workloads[0])
    for chosen in args.workloads:
        measured[chosen] = {name: [] for name in engines}
        for turn in range(args.turns):
            for name, engine in engines.items():
                with console.status(f"{chosen}, turn {turn + 1} of {args.turns}: {name}"):
                    measured[chosen][name].append(engine.ask(chosen))
    memory = {name: engine.end() for name, engine in engines.items()}
    report(measured, memory, f"{command_line.describe(args)}, {os.cpu_count()} cores")
    if args.json:
        runs.save(args.json, **command_line.engine_options(args), runs=measured, peak_tree_rss_mib=memory)


def report(measured: dict[str, dict[str, list[dict[str, Any]]]], memory: dict[str, float], title: str) -> None:
    table = Table(title=f"{title}, output tokens/s", title_justify="left")
    for column in ("", "vLLM", "Headrace", "medians' ratio"):
        table.add_column(column, justify="left" if not column else "right")
    for chosen, each in measured.items():
        ratio = runs.median(each["headrace"], SPEED) / runs.median(each["vllm"], SPEED)
        shown = [" ".join(f"{turn[SPEED]:.4g}" for turn in each[name]) for name in ("vllm", "headrace")]
        table.add_row(chosen, *shown, f"{ratio:.2f}")
    ratio = memory["headrace"] / memory["vllm"]
    table.add_row("peak memory, MiB", f"{memory['vllm']:.0f}", f"{memory['headrace']:.0f}", f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
