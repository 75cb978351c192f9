"""Headrace's engine and vLLM in turns on one machine. Each is loaded once in its own process, so both are warm.

    python benchmarks/beside_vllm.py --vllm PYTHON [--dtype float32] [--workloads mixed] [--turns 3] [--json FILE]

Shows the output tokens per second of each turn, without prefix caching. Each workload runs once before the counted
turns. The engine that has no turn is stopped, because an idle vLLM keeps looking for work. Both have the same weights
and requests. vLLM gets all cores, 64 sequences and steps of 2,048 tokens. Headrace runs with its defaults.
`--quantization` and `--kv-cache-dtype` apply to Headrace only.
"""

import argparse
import os
import signal
import sys
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.table import Table

import command_line
import runs
import workload

SPEED = "output_tokens_per_second"
Figures = dict[str, list[dict[str, Any]]]  # by engine, the figures of its turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command_line.add_model_options(parser)
    parser.add_argument("--vllm", metavar="PYTHON", required=True, help="the Python that has it installed")
    parser.add_argument("--workloads", nargs="+", choices=workload.NAMES, default=workload.NAMES[:3])
    parser.add_argument("--turns", type=command_line.count, default=3)
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):  # else a stopped engine would stay alive
        signal.signal(number, lambda *_: sys.exit(1))
    measured: dict[str, Figures] = {chosen: {"vLLM": [], "Headrace": []} for chosen in args.workloads}
    with ExitStack() as stack, Console(stderr=True).status("") as status:
        engines: dict[str, runs.Loaded] = {}
        for name in ("vLLM", "Headrace"):  # one after the other, because each reads how much memory is free
            status.update(f"{name} begins")
            vllm = name == "vLLM"
            loaded = command_line.loaded_vllm(args, args.workloads) if vllm else command_line.loaded(args)
            engines[name] = stack.enter_context(loaded)
            for chosen in args.workloads:
                engines[name].ask(chosen)
        for chosen, figures in measured.items():
            for turn in range(args.turns):
                for name in sorted(engines, reverse=turn % 2 == 0):  # each goes first in turn
                    status.update(f"{chosen}, turn {turn + 1} of {args.turns}: {name}")
                    figures[name].append(engines[name].ask(chosen))
        memory = {name: engine.peak_rss_mib for name, engine in engines.items()}
    report(measured, memory, f"{command_line.describe(args)}, {os.cpu_count()} cores, output tokens/s")
    if args.json:
        runs.save(args.json, **command_line.engine_options(args), runs=measured, peak_tree_rss_mib=memory)


def report(measured: dict[str, Figures], memory: dict[str, float], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("", "vLLM", "Headrace", "Headrace / vLLM, medians"):
        table.add_column(column, justify="left" if not column else "right")
    for chosen, figures in measured.items():
        ratio = runs.median(figures["Headrace"], SPEED) / runs.median(figures["vLLM"], SPEED)
        turns = [" ".join(f"{turn[SPEED]:.4g}" for turn in figures[name]) for name in ("vLLM", "Headrace")]
        table.add_row(chosen, *turns, f"{ratio:.2f}")
    ratio = memory["Headrace"] / memory["vLLM"]
    table.add_row("peak RSS, MiB", *(f"{memory[name]:.0f}" for name in ("vLLM", "Headrace")), f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
