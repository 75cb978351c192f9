"""Time to first token and between tokens: for requests that arrive one by one, and for one request alone.

    python benchmarks/latency.py [--dtype float32] [--rate 2.6] [--runs 3] [--vllm PYTHON] [--json FILE]

Arrivals are a Poisson process with `--rate` requests per second, the same in every run. The engine without a queue, the
engine behind the queue and, with `--vllm`, vLLM take turns.
"""

import argparse
import os
from typing import Any

from rich.console import Console
from rich.table import Table

import command_line
import plot
import runs

TITLES = {
    "engine_poisson": "engine (AsyncLLMEngine)",
    "queue_poisson": "through Celery and Redis",
    "vllm_poisson": "vLLM (AsyncLLM)",
    "single": "engine, one request alone",
    "vllm_single": "vLLM, one request alone",
}
FIGURES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command_line.add_model_options(parser)
    command_line.add_comparison_options(parser)
    parser.add_argument("--rate", type=float, default=2.6, help="requests a second")
    parser.add_argument("--runs", type=command_line.count, default=3, help="of each; medians are reported")
    args = parser.parse_args()
    names = [name for name in TITLES if args.vllm or not name.startswith("vllm")]
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    console = Console(stderr=True)
    for number in range(args.runs):
        for name in names:
            with console.status(f"{name}, run {number + 1} of {args.runs}"):
                rate = ["--rate", str(args.rate)]
                if name.startswith("vllm"):
                    measured[name].append(command_line.measure_vllm(name.removeprefix("vllm_"), args, *rate))
                else:
                    measured[name].append(command_line.measure(name, args, *rate))
    title = f"{command_line.describe(args)}, {args.rate:g} requests/s, {os.cpu_count()} cores"
    table = Table(title=f"{title}; milliseconds, medians of {args.runs}", title_justify="left")
    for column in ("", *(name.replace("_", " ") for name in FIGURES), "tokens/s", "peak RSS MiB", "others' cores"):
        table.add_column(column, justify="left" if not column else "right")
    for name, each in measured.items():
        table.add_row(
            TITLES[name],
            *(f"{1000 * runs.median(each, figure):.1f}" for figure in FIGURES),
            f"{runs.median(each, 'output_tokens_per_second'):.1f}",
            f"{max(run['peak_tree_rss_mib'] for run in each):.0f}",
            " ".join(f"{run['other_cores']:.2f}" for run in each),
        )
    Console().print(table)
    if args.json:
        runs.save(args.json, **command_line.engine_options(args), rate=args.rate, runs=measured)
    if args.plot:
        shown = {TITLES[name]: 1000 * runs.median(each, "ttft_p50") for name, each in measured.items()}
        plot.bars(args.plot, f"Time to first token, p50, ms: {title}", shown)


if __name__ == "__main__":
    main()
