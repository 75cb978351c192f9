"""Headrace's engine and llama.cpp's programs in turns, on the same GGUF files of random weights.

    python benchmarks/beside_llamacpp.py PROGRAMS --json FILE [--shape 1B] [--types Q4_K_M] [--cells one] [--turns 5]

PROGRAMS is the folder with llama-bench, llama-batched-bench, llama-server and llama-quantize, built with GGML_NATIVE.
The models are written into --folder and converted by llama-quantize if they are not there. Figures are appended to the
JSON file, and the table shows all that it has. So cells can be run one at a time.

    one            128 tokens of one request; llama-bench -n 128
    batch-N        the steps in which N requests decode; llama-batched-bench
    server-N       N requests at once with their prompts: the engine without HTTP; llama-server with N slots
    prompt-N       a prompt of N tokens; llama-bench -p N

Every turn loads the model. Tokens and their numbers are the same, and no prefix is cached.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import torch
from rich.console import Console
from rich.table import Table

import command_line
import random_gguf
import runs
from gguf_turn import NEW_TOKENS, PROMPT_TOKENS

_FOLDER = Path(__file__).parent
_CELLS = ("one", "batch-4", "batch-16", "batch-64", "server-16", "prompt-512", "prompt-4096")
_PORT = 18087
_NAMES = ("llama.cpp", "Headrace")
Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--shape", choices=random_gguf.SHAPES, default="1B")
    parser.add_argument("--types", nargs="*", default=["Q8_0", "Q4_0", "Q4_K_M"])
    parser.add_argument("--cells", nargs="*", default=_CELLS, help="none: only show the table")
    parser.add_argument("--turns", type=command_line.count, default=5)
    parser.add_argument("--threads", type=command_line.count, default=os.cpu_count())
    parser.add_argument("--dtype", default="auto", help="of Headrace")
    parser.add_argument("--folder", type=Path, default=Path("build/random-models"))
    args = parser.parse_args()
    found = json.loads(args.json.read_text()) if args.json.exists() else {"turns": []}
    found |= {"machine": machine(args.programs)}
    for kind in args.types:
        for cell in args.cells:
            file = model(args, kind)
            for turn in range(args.turns):
                same = {
                    "shape": args.shape,
                    "type": kind,
                    "cell": cell,
                    "dtype": args.dtype,
                    "bytes": file.stat().st_size,
                }
                for name in _NAMES if turn % 2 else reversed(_NAMES):  # each goes first in turn
                    figures = _own(args, file, cell) if name == "Headrace" else _theirs(args, file, cell)
                    found["turns"].append(
                        {**same, "engine": name, "read_gb_s": read_bandwidth(args.threads), **figures}
                    )
                    args.json.write_text(json.dumps(found, indent=1))
    report(found)


def machine(programs: Path) -> dict[str, str]:
    """Return processor, compilers and versions."""
    version = subprocess.run(
        [programs / "llama-batched-bench", "--version"], capture_output=True, text=True, check=True
    )
    compiler = shutil.which(os.environ.get("CC", "cc")) or "no compiler"
    own = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=_FOLDER, capture_output=True, text=True, check=False
    )
    return {
        "processor": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "features": " ".join(name for name, there in torch.cpu.get_capabilities().items() if there is True),
        "llama.cpp": " ".join((version.stdout + version.stderr).split()),
        "Headrace": f"{commit.stdout.strip()}, {own.splitlines()[0]}, torch {torch.__version__}",
    }


def model(args: argparse.Namespace, kind: str) -> Path:
    """Return the file of a type. It is written if it does not exist."""
    args.folder.mkdir(parents=True, exist_ok=True)
    plain, file = (args.folder.resolve() / f"{args.shape}-{each}.gguf" for each in ("BF16", kind))
    if not plain.exists():
        random_gguf.write(random_gguf.SHAPES[args.shape], plain)
    if not file.exists():
        command = [args.programs / "llama-quantize", plain, file, kind, str(args.threads)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return file


def read_bandwidth(threads: int) -> float:
    """Return how many GB/s are read: the best of ten sums of 1 GiB."""
    torch.set_num_threads(threads)
    data, best = torch.ones(1 << 28, dtype=torch.int32), 0.0
    for _ in range(10):
        started = time.perf_counter()
        data.amax()
        best = max(best, data.nbytes / (time.perf_counter() - started) / 1e9)
    return best


def _own(args: argparse.Namespace, file: Path, cell: str) -> Figures:
    kind, _, count = cell.partition("-")
    chosen = ["batch" if kind == "server" else kind, count or "128", str(file), "--dtype", args.dtype]
    env = {"OMP_NUM_THREADS": str(args.threads)}
    figures = runs.run([sys.executable, str(_FOLDER / "gguf_turn.py"), *chosen], env)
    return figures | ({"tokens_per_second": figures["with_prompts"]} if kind == "server" else {})


def _theirs(args: argparse.Namespace, file: Path, cell: str) -> Figures:
    kind, _, count = cell.partition("-")
    common = ["-m", str(file), "-t", str(args.threads)]
    if kind == "server":
        return _server(args.programs, common, int(count))
    if kind == "batch":
        sizes = ["-npp", str(PROMPT_TOKENS), "-ntg", str(NEW_TOKENS), "-npl", count]
        context = ["-c", str(int(count) * (PROMPT_TOKENS + NEW_TOKENS)), "--output-format", "jsonl"]
        figures = runs.run([str(args.programs / "llama-batched-bench"), *common, *sizes, *context])
        return _part(figures) | {"tokens_per_second": figures["speed_tg"]}
    sizes = ["-p", count, "-n", "0"] if kind == "prompt" else ["-p", "0", "-n", "128"]
    figures = runs.run([str(args.programs / "llama-bench"), *common, *sizes, "-r", "1", "-o", "jsonl"])
    return _part(figures) | {"tokens_per_second": figures["avg_ts"]}


def _part(figures: Figures) -> Figures:
    return {name: figures[name] for name in ("peak_tree_rss_mib", "other_cores")}


def _server(programs: Path, common: list[str], slots: int) -> Figures:
    context = str(slots * (PROMPT_TOKENS + NEW_TOKENS + 16))
    command = [str(programs / "llama-server"), *common, "--port", str(_PORT), "-np", str(slots), "-c", context]
    begun = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_ready(server)
        ready = time.perf_counter() - begun
        with ThreadPoolExecutor(slots) as clients:
            _complete(0, 2)
            started = time.perf_counter()
            counts = list(clients.map(_complete, range(slots), [NEW_TOKENS] * slots))
            seconds = time.perf_counter() - started
        peak = psutil.Process(server.pid).memory_info().rss / 2**20
    finally:
        server.terminate()
        server.wait()
    assert counts == [NEW_TOKENS] * slots, counts
    return {"tokens_per_second": sum(counts) / seconds, "ready_seconds": ready, "peak_tree_rss_mib": peak}


def _wait_ready(server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            with urlopen(f"http://127.0.0.1:{_PORT}/health"):
                return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"llama-server ended with {server.returncode}")


def _complete(row: int, new: int) -> int:
    prompt = [(7 * row + 3 * position) % 1000 + 300 for position in range(PROMPT_TOKENS)]
    body = {"prompt": prompt, "n_predict": new, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    request = Request(
        f"http://127.0.0.1:{_PORT}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urlopen(request) as answer:
        return int(json.load(answer)["tokens_predicted"])


def report(found: dict[str, Any]) -> None:
    console = Console(width=160)
    for name, value in found["machine"].items():
        console.print(f"{name}: {value}", highlight=False)
    table = Table(title="output or prompt tokens/s: median, least to most", title_justify="left")
    for column in ("shape", "type", "cell", "dtype", *_NAMES, "ratio", "of read bandwidth", "peak MiB", "other cores"):
        table.add_column(column, justify="right")
    names = ("shape", "type", "cell", "dtype")
    for cell in dict.fromkeys(tuple(turn[name] for name in names) for turn in found["turns"]):
        turns = [turn for turn in found["turns"] if tuple(turn[name] for name in names) == cell]
        speeds, peaks, others = [], [], []
        for engine in _NAMES:
            own = [turn for turn in turns if turn["engine"] == engine]
            speeds.append(sorted(turn["tokens_per_second"] for turn in own) or [float("nan")])
            peaks.append(max((turn["peak_tree_rss_mib"] for turn in own), default=float("nan")))
            others.append(max((turn.get("other_cores", 0.0) for turn in own), default=0.0))
        theirs, own_speed = map(statistics.median, speeds)
        bandwidth = statistics.median(turn["read_gb_s"] for turn in turns) * 1e9
        share = (
            f"{own_speed * turns[0]['bytes'] / bandwidth:.0%} of {bandwidth / 1e9:.1f} GB/s" if cell[2] == "one" else ""
        )
        ranges = [f"{statistics.median(each):.4g} ({each[0]:.4g}-{each[-1]:.4g})" for each in speeds]
        table.add_row(
            *cell, *ranges, f"{own_speed / theirs:.2f}", share, "{:.0f} / {:.0f}".format(*peaks), f"{max(others):.1f}"
        )
    console.print(table)


if __name__ == "__main__":
    main()
