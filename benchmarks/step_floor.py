"""Decode steps compared with their matrix products alone: how much time of a step the rest of the engine takes.

    python benchmarks/step_floor.py [--dtype float32] [--rows 1 64] [--context 256] [--kv-cache-dtype bfloat16]

For each number of requests it shows three median times: of a decode step of the engine; of the engine's packed linear
layers, called one after the other on as many rows; and of the same layers in oneDNN, with weights packed for oneDNN.
Steps and products take turns. oneDNN's time does not change when the engine's own kernels become faster. The ratios
depend little on the machine. With `--limit`, the ratio of a step to its own products decides the exit status.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import command_line
from headrace_engine import LLM, SamplingParams
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.core.outputs import EngineCoreOutputs
from headrace_engine.runner.linear import packed_linear
from headrace_engine.runner.linear.int8_linear import Int8Linear
from headrace_engine.runner.linear.native_linear import NativeGatedLinear, NativeLinear
from headrace_engine.runner.linear.packed_linear import PackedLinear

_STEPS = 40
_TOKENS_A_STEP = 8192  # prompts are computed in few steps, after which all requests decode together


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command_line.add_model_options(parser)
    parser.add_argument("--rows", type=command_line.count, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=command_line.count, default=256, help="tokens that each request has before")
    parser.add_argument("--limit", type=float, help="exit with 1 where a ratio is above this")
    args = parser.parse_args()
    model = args.model or command_line.default_model.fetch(args.dtype)
    table = Table(title=f"{command_line.describe(args)}, milliseconds a step", title_justify="left")
    for column in ("requests", "decode step", "its products alone", "to its own", "oneDNN's products", "to oneDNN's"):
        table.add_column(column, justify="right")
    sizes = {"max_num_seqs": max(args.rows), "max_num_batched_tokens": _TOKENS_A_STEP}
    llm = LLM(str(model), **command_line.engine_options(args), **sizes)
    worst = 0.0
    for rows in args.rows:
        step, products, packed = measure(llm, rows, args.context)
        worst = max(worst, step / products)
        table.add_row(str(rows), f"{1000 * step:.1f}", *_against(products, step), *_against(packed, step))
    Console().print(table)
    return 1 if args.limit is not None and worst > args.limit else 0


def measure(llm: LLM, rows: int, context: int) -> tuple[float, float, float]:
    """Return the median seconds of a step in which `rows` requests get one token each, of its products and of oneDNN's.

    The last is 0 if oneDNN does not compute this type here.

    They take turns, so that a change of the machine's speed affects all three.
    """
    steps: list[float] = []
    products: list[float] = []
    packed: list[float] = []
    layers = _packed_layers()
    dtype = next(layer for layer in layers if not isinstance(layer, Int8Linear))._packed.dtype
    inputs = {width: torch.randn(rows, width).to(dtype) for width in {layer.in_features for layer in layers}}
    same = _packed_by_onednn(layers, dtype)
    step: Callable[[EngineCore], EngineCoreOutputs] = EngineCore.step

    def timed(core: EngineCore) -> EngineCoreOutputs:
        started = time.perf_counter()
        outputs = step(core)
        seconds = time.perf_counter() - started
        if not outputs.stats.num_requests == outputs.stats.num_tokens == rows:
            return outputs  # not all of them decode
        steps.append(seconds)
        for times, floor in ((products, layers), (packed, same)):
            started = time.perf_counter()
            with torch.inference_mode():
                for layer in floor:
                    layer(inputs[layer.in_features])
            times.append(time.perf_counter() - started if floor else 0.0)
        return outputs

    EngineCore.step = timed  # type: ignore[assignment,method-assign]
    try:
        prompts = [[(7 * row + position) % 1000 + 10 for position in range(context)] for row in range(rows)]
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=_STEPS + 1)
        llm.generate(prompts, params, use_tqdm=False)
    finally:
        EngineCore.step = step  # type: ignore[assignment,method-assign]
    return statistics.median(steps), statistics.median(products), statistics.median(packed)


def _against(floor: float, step: float) -> tuple[str, str]:
    return (f"{1000 * floor:.1f}", f"{step / floor:.2f}") if floor else ("-", "-")


def _packed_layers() -> list[Any]:
    """Return all packed linear layers of this process, with their biases."""
    kinds = (PackedLinear, NativeLinear, NativeGatedLinear, Int8Linear)
    return [found for found in gc.get_objects() if type(found) in kinds]


def _packed_by_onednn(layers: Sequence[Any], dtype: torch.dtype) -> list[PackedLinear]:
    """Return layers of the same sizes; none if oneDNN does not compute this type here."""
    if not packed_linear.supports(dtype):
        return []
    return [PackedLinear(torch.randn(layer.out_features, layer.in_features).to(dtype), None) for layer in layers]


if __name__ == "__main__":
    sys.exit(main())
