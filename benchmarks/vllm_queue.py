"""The cost of the queue in front of vLLM: a worker with `--engine vllm`, compared with `vllm.LLM.generate` alone.

    python benchmarks/vllm_queue.py --vllm PYTHON [--dtype float32] [--turns 8] [--eager] [--json FILE]

Both sides run vLLM with the same weights, options and environment. They stay loaded, and take turns with the 64 mixed
requests, all at once: no prefix caching, 64 sequences, steps of 2,048 tokens, all cores, the same KV memory, allocator
and OpenMP library. `LLM.generate` returns whole texts. Through Redis and the worker, every token is streamed to this
process. The vLLM without a queue is stopped while it has no turn, because it would look for work. The worker's engine
waits for its pipe instead; the processor time that the service uses meanwhile is shown.

The mean of the pairs is shown with its standard error. The exit status is 1 if tokens through the queue differ from the
reference in float32.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

import command_line
import runs
from headrace_engine.checkpoints import default_model
from measurements import Setup, running_service, through_queue
from workload import BenchmarkRequest, expected_fp32

SIDES = ("LLM.generate", "queue")
SPEED = "output_tokens_per_second"
_OPTIONS = {"max_model_len": 1024, "max_num_seqs": 64, "max_num_batched_tokens": 2048}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON", required=True, help="the Python that has it installed")
    parser.add_argument("--model", help="model folder [default: the default model, fetched]")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--turns", type=command_line.count, default=8, help="of each side, behind one to warm up")
    parser.add_argument("--eager", action="store_true", help="without compiled graphs: starts in seconds")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    args.model = args.model or str(default_model.fetch(args.dtype))
    for number in (signal.SIGTERM, signal.SIGHUP):  # else a stopped engine would stay alive
        signal.signal(number, lambda *_: sys.exit(1))
    measured = asyncio.run(_measure(args))
    report(measured, f"{args.dtype}, {'eager' if args.eager else 'compiled'}, {os.cpu_count()} cores")
    if args.json:
        runs.save(args.json, dtype=args.dtype, eager=args.eager, runs=measured)
    return 1 if args.dtype == "float32" and any(turn["equal_to_fp32"] != 64 for turn in measured["queue"]) else 0


async def _measure(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    setup = Setup(args.model, args.dtype, "mixed", 0.0, None, "auto", enable_prefix_caching=False)
    engine_args = json.dumps({"enforce_eager": args.eager})
    engine = {"engine": "vllm", "engine_python": args.vllm, "engine_args": engine_args, **_OPTIONS}
    measured: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with (
        Console(stderr=True).status("plain vLLM begins") as status,
        command_line.loaded_vllm(args, ["mixed"], "--engine-args", engine_args) as plain,
    ):
        plain.ask("mixed")
        status.update("the worker begins")
        os.environ.update(command_line.VLLM_VARIABLES)
        others = set(psutil.Process().children())
        async with running_service(setup, **engine) as client:
            service = [process for process in psutil.Process().children() if process not in others]
            sides = {
                "LLM.generate": lambda: _plainly(plain),
                "queue": lambda: _through_queue(client, setup.requests()),
            }
            for turn in range(args.turns + 1):  # the first turn allocates memory and is not counted
                for side in sorted(SIDES, reverse=turn % 2 == 1):  # each goes first in turn
                    status.update(f"{side}, turn {turn} of {args.turns}")
                    before = _Used(service)
                    figures = await sides[side]()
                    if turn:
                        measured[side].append(figures | _Used(service).since(before))
                    status.console.print(f"turn {turn}, {side}: {figures[SPEED]:.1f} tokens/s")
    return measured


async def _plainly(plain: runs.Loaded) -> dict[str, Any]:
    return plain.ask("mixed")  # blocks: nothing else must run meanwhile


async def _through_queue(client: Any, requests: Sequence[BenchmarkRequest]) -> dict[str, Any]:
    started = time.perf_counter()
    _, token_ids = await through_queue(client, requests)
    seconds = time.perf_counter() - started
    num_tokens = sum(map(len, token_ids))
    equal = sum(own == known for own, known in zip(token_ids, expected_fp32(), strict=True))
    return {"seconds": seconds, SPEED: num_tokens / seconds, "output_tokens": num_tokens, "equal_to_fp32": equal}


class _Used:
    """Processor time until now: of the server, the worker and its engine; of this process; of the whole machine."""

    def __init__(self, service: Sequence[psutil.Process]) -> None:
        engines = [child for process in service for child in process.children(recursive=True)]
        own = psutil.Process()
        self._seconds = {
            "service": runs.processor_seconds([*service, *engines]),
            "beside_engine": runs.processor_seconds([*service, own]),
            "all": runs.processor_seconds([own, *own.children(recursive=True)]),
            "machine": runs.busy_seconds(),
        }

    def since(self, before: "_Used") -> dict[str, float]:
        used = {name: seconds - before._seconds[name] for name, seconds in self._seconds.items()}
        others = max(0.0, used["machine"] - used["all"])
        return {
            "service_seconds": used["service"],
            "beside_engine_seconds": used["beside_engine"],
            "others_seconds": others,
        }


def report(measured: dict[str, list[dict[str, Any]]], title: str) -> None:
    plain, queue = ([turn[SPEED] for turn in measured[side]] for side in SIDES)
    ratios = [through / alone for alone, through in zip(plain, queue, strict=True)]
    table = Table(title=f"64 requests, vLLM, {title}", title_justify="left")
    for column in ("", *SIDES, "queue / LLM.generate"):
        table.add_column(column, justify="right")
    for alone, through, ratio in zip(plain, queue, ratios, strict=True):
        table.add_row("output tokens/s", f"{alone:.1f}", f"{through:.1f}", f"{ratio:.3f}")
    medians = [statistics.median(each) for each in (plain, queue)]
    table.add_row("medians", *(f"{each:.1f}" for each in medians), f"{medians[1] / medians[0]:.3f}")
    if len(ratios) > 1:
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        table.add_row("mean of pairs", "", "", f"{statistics.mean(ratios):.3f} ± {error:.3f}")
    for what, name, shown in (
        ("service, cores used", "service_seconds", (0, 1)),
        ("worker, Redis and client, cores used", "beside_engine_seconds", (1,)),
        ("everybody else, cores used", "others_seconds", (0, 1)),
    ):
        cores = [statistics.median(turn[name] / turn["seconds"] for turn in measured[side]) for side in SIDES]
        table.add_row(what, *(f"{each:.2f}" if number in shown else "" for number, each in enumerate(cores)), "")
    equal = min(turn["equal_to_fp32"] for turn in measured["queue"])
    table.add_row("requests equal to the float32 reference", "", str(equal), "")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
