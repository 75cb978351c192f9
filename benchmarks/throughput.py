"""Output tokens per second: the engine alone, the same engine behind the queue, and other engines.

    python benchmarks/throughput.py [--dtype float32] [--workload long-prompts] [--runs 3] [--vllm PYTHON] [--json FILE]

All get the same requests. Each measurement runs in its own process, and they take turns, so that a machine whose speed
drifts favours none. No figure is a test: nothing fails because a machine is slow. But the answers are compared: in
float32 they must equal the known ones.
"""

import argparse
import os
from typing import Any

from rich.console import Console
from rich.table import Table

import command_line
import plot
import runs
import workload

TITLES = {
    "offline": "engine alone (LLM.generate)",
    "queue": "through Celery and Redis, streamed",
    "vllm": "vLLM (LLM.generate)",
    "transformers": "transformers.generate, one at a time",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command_line.add_model_options(parser)
    command_line.add_comparison_options(parser)
    parser.add_argument("--workload", choices=workload.NAMES, default="mixed")
    parser.add_argument(
        "--runs", type=command_line.count, default=3, help="of each but transformers; medians are reported"
    )
    parser.add_argument("--only", nargs="+", choices=TITLES, help="only these")
    args = parser.parse_args()
    options = ["--workload", args.workload]
    names = args.only or [name for name in TITLES if name != "vllm" or args.vllm]
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    console = Console(stderr=True)
    for number in range(args.runs):
        for name in names:
            if name == "transformers" and number:
                continue  # it takes minutes
            with console.status(f"{name}, run {number + 1} of {args.runs}"):
                if name == "vllm":
                    measured[name].append(command_line.measure_vllm("offline", args, *options))
                else:
                    measured[name].append(command_line.measure(name, args, *options))
    report(measured, f"{args.workload}, {command_line.describe(args)}")
    if args.json:
        runs.save(args.json, **command_line.engine_options(args), workload=args.workload, runs=measured)
    if args.plot:
        speeds = {TITLES[name]: runs.median(each, "output_tokens_per_second") for name, each in measured.items()}
        plot.bars(args.plot, f"Output tokens a second: {args.workload}, {command_line.describe(args)}", speeds)


def report(measured: dict[str, list[dict[str, Any]]], title: str) -> None:
    speed = {name: runs.median(each, "output_tokens_per_second") for name, each in measured.items()}
    table = Table(title=f"{title}, {os.cpu_count()} cores", title_justify="left")
    for column in ("", "output tokens/s", "runs", "equal to float32", "peak RSS MiB", "others' cores"):
        table.add_column(column, justify="left" if not column else "right")
    for name, each in measured.items():
        equal = [f"{run['equal_to_fp32']} of {run['requests']}" for run in each if "equal_to_fp32" in run]
        table.add_row(
            TITLES[name],
            f"{speed[name]:.1f}",
            runs.each(each, "output_tokens_per_second"),
            min(equal, default=""),
            f"{max(run['peak_tree_rss_mib'] for run in each):.0f}",
            " ".join(f"{run['other_cores']:.2f}" for run in each),
        )
    Console().print(table)
    for over, under in (("queue", "offline"), ("offline", "vllm"), ("offline", "transformers")):
        if over in speed and under in speed:
            print(f"{over + ' / ' + under:24}{speed[over] / speed[under]:.3f}")
    if "queue" in measured:
        last = measured["queue"][-1]
        print(f"queue: TTFT p50 {1000 * last['ttft_p50']:.0f} ms, ITL p50 {1000 * last['itl_p50']:.0f} ms")
    if "offline" in measured:
        print(f"engine: start {runs.median(measured['offline'], 'startup_seconds'):.1f} s")


if __name__ == "__main__":
    main()
