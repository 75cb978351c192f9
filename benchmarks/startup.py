"""The cost of a worker's start: until it takes requests, and until its engine is ready again after a crash.

    python benchmarks/startup.py [--model FOLDER] [--dtype float32] [--runs 3]

Shows the processor time and the memory of the worker's process and of its engine's process, when both are ready and no
request was served yet. The memory is Pss, which counts shared memory once. Except in a first run, all files are in the
page cache.
"""

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import command_line
from headrace_broker.server.embedded import EmbeddedServer
from headrace_cli.local.process import LocalWorker, ProcessStartError

_TICKS = os.sysconf("SC_CLK_TCK")
_PATIENCE_SECONDS = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command_line.add_model_options(parser)
    parser.add_argument("--runs", type=command_line.count, default=3)
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    model = str(args.model or command_line.default_model.fetch(args.dtype))
    settings = {name: value for name, value in command_line.engine_options(args).items() if value is not None}
    settings["log_level"] = "INFO"
    with EmbeddedServer() as server:
        runs = [start(model, server.url, settings) for _ in range(args.runs)]
    table = Table(title=f"{Path(model).name}, {command_line.describe(args)}", title_justify="left")
    for column in ("", *(f"run {number}" for number in range(1, args.runs + 1)), "median"):
        table.add_column(column, justify="right" if column else "left")
    for name in runs[0]:
        values = [run[name] for run in runs]
        table.add_row(name, *(f"{value:.1f}" for value in [*values, statistics.median(values)]))
    Console().print(table)
    if args.json is not None:
        Path(args.json).write_text(json.dumps({"model": model, "settings": settings, "runs": runs}, indent=1) + "\n")


def start(model: str, redis_url: str, settings: dict[str, Any]) -> dict[str, float]:
    """Start a worker, kill its engine like a crash, and wait until the worker has started another. Return figures."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        with LocalWorker(model=model, redis_url=redis_url, log=Path(folder) / "log", **settings) as worker:
            worker.wait_ready()
            ready = time.monotonic()
            engine = _engine_of(worker.pid)
            figures = {
                "ready, s": ready - begun,
                "processor time of the worker, s": _processor_seconds(worker.pid),
                "processor time of the engine, s": _processor_seconds(engine),
                "memory of the worker, MiB": _pss_mib(worker.pid),
                "memory of the engine, MiB": _pss_mib(engine),
            }
            crashed = time.monotonic()
            os.kill(engine, signal.SIGKILL)
            _wait_for_another(worker, engine)
            worker.wait_ready()
            return figures | {"ready again after a crash, s": time.monotonic() - crashed}


def _wait_for_another(worker: LocalWorker, engine: int) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while _engine_of(worker.pid) in (engine, 0):
        if time.monotonic() > deadline:
            raise ProcessStartError(
                f"the worker has no other engine after {_PATIENCE_SECONDS:g} s:\n{worker.log_tail()}"
            )
        time.sleep(0.05)


def _engine_of(worker: int) -> int:
    """Return the pid of the worker's engine process; 0 while there is none."""
    for children in Path(f"/proc/{worker}/task").glob("*/children"):
        try:
            for child in children.read_text().split():
                if b"headrace_engine.core.child" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        except OSError:
            continue  # the process or thread has just ended
    return 0


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _pss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    main()
