"""Options and helpers that the benchmarks' command lines share."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import runs
from headrace_engine.checkpoints import default_model
from headrace_engine_vllm.environment import preloaded

VLLM_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Run vLLM on all cores. By default it would leave one of two cores idle."""
_FOLDER = Path(__file__).parent


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="model folder [default: the default model, fetched]")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", choices=("int8",))
    parser.add_argument("--kv-cache-dtype", choices=("auto", "bfloat16"), default="auto")


def add_comparison_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vllm", metavar="PYTHON", help="also measure vLLM, by the Python that has it installed")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", metavar="FILE", help="draw them there, as SVG")


def count(text: str) -> int:
    """Parse an option that is a count of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, must be an integer of at least 1")
    return int(text)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options of a run, by their names in `EngineArgs`."""
    return {name: getattr(args, name) for name in ("dtype", "quantization", "kv_cache_dtype")}


def describe(args: argparse.Namespace) -> str:
    """Return these options as text for a title. Only the dtype applies to a peer."""
    cache = f"K/V in {args.kv_cache_dtype}" if args.kv_cache_dtype != "auto" else None
    own = ", ".join(filter(None, (args.quantization, cache)))
    return f"{args.dtype} (Headrace: {own})" if own else str(args.dtype)


def measure(name: str, args: argparse.Namespace, *options: str) -> dict[str, Any]:
    """Run one measurement of `measurements.py`."""
    return runs.run([*_own(name, args), *options])


def measure_vllm(kind: str, args: argparse.Namespace, *options: str) -> dict[str, Any]:
    """Run one measurement of `vllm_peer.py`."""
    return runs.run([*_vllm(kind, args), *options], vllm_env(args.vllm))


def loaded(args: argparse.Namespace) -> runs.Loaded:
    """Start Headrace's engine, which then runs one workload after the other on request."""
    return runs.Loaded(_own("turns", args))


def loaded_vllm(args: argparse.Namespace, workloads: Sequence[str], *options: str) -> runs.Loaded:
    """Start vLLM, which then runs these workloads on request. `options` are further options of `vllm_peer.py`."""
    return runs.Loaded([*_vllm("turns", args), "--workload", *workloads, *options], vllm_env(args.vllm))


def _own(name: str, args: argparse.Namespace) -> list[str]:
    chosen = ["--kv-cache-dtype", args.kv_cache_dtype]
    chosen += ["--quantization", args.quantization] if args.quantization else []
    return [sys.executable, str(_FOLDER / "measurements.py"), name, *_common(args), *chosen]


def _vllm(kind: str, args: argparse.Namespace) -> list[str]:
    return [args.vllm, str(_FOLDER / "vllm_peer.py"), kind, *_common(args)]


def vllm_env(python: str) -> dict[str, str]:
    """Return vLLM's environment, with the allocator and the OpenMP library that it advises. Workers use the same."""
    libraries = preloaded(python)
    if "tcmalloc" not in libraries.get("LD_PRELOAD", os.environ.get("LD_PRELOAD", "")):
        print(
            f"warning: {python} runs without tcmalloc, which vLLM advises on CPUs, so its figures are lower than they "
            "could be: install Debian's libtcmalloc-minimal4",
            file=sys.stderr,
        )
    return {"PYTHONPATH": str(_FOLDER.parent / "cli"), **libraries, **VLLM_VARIABLES}


def _common(args: argparse.Namespace) -> list[str]:
    if args.model is None:
        args.model = str(default_model.fetch(args.dtype))
    return ["--model", args.model, "--dtype", args.dtype]
